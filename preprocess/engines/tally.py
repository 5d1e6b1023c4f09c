"""Messages between a run and its workers on other machines while shards are made.

Imports little, because its process does not need the modules of workers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class Tally:
    """Keeps the latest counts of each shard until they are read, and whether the run has ended.

    Runs as an actor of the Ray engine.
    """

    def __init__(self) -> None:
        self._lines: dict[int, npt.NDArray[np.int64]] = {}
        self._stopped = False

    def stop(self) -> None:
        """Records that the run has ended and needs no more shards."""
        self._stopped = True

    def stopped(self) -> bool:
        """Returns whether the run has ended."""
        return self._stopped

    def put(self, shard: int, line: npt.NDArray[np.int64]) -> bool:
        """Replaces the counts of a shard. Returns whether the run has ended.

        Args:
            shard: Number of the shard.
            line: A row of :meth:`vlmdata.preprocess.shards.counters.Counters.table`.
        """
        self._lines[shard] = line
        return self._stopped

    def take(self) -> dict[int, npt.NDArray[np.int64]]:
        """Returns the counts that have changed since the last call."""
        lines, self._lines = self._lines, {}
        return lines
