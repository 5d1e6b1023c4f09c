"""Live counts of a run, for its progress display."""

from __future__ import annotations

import multiprocessing

import numpy as np
import numpy.typing as npt

from preprocess.shard_job import RowOutcome
from vlmdata.format.manifest import Totals

_FIELDS = ("rows", "images", "tokens", "rejected")


class Counters:
    """Row counts that workers write and the parent reads, without a lock that a dying worker could take along.

    Every shard has its own line in shared memory, written by the one worker that makes it.
    """

    def __init__(self, shards: int):
        self._shared = multiprocessing.RawArray("q", shards * len(_FIELDS))

    def table(self) -> npt.NDArray[np.int64]:
        """int64 (shards, 4): rows, images, tokens, rejected; a live view."""
        return np.frombuffer(self._shared, dtype=np.int64).reshape(-1, len(_FIELDS))

    def start(self, shard: int) -> None:
        """Forgets what an earlier attempt at the shard counted."""
        self.table()[shard] = 0

    def add(self, shard: int, outcome: RowOutcome) -> None:
        """Counts a row."""
        self.table()[shard] += (1, outcome.images, outcome.tokens, outcome.rejected)

    def finish(self, shard: int, totals: Totals) -> None:
        """Sets the counts of a shard that is whole."""
        self.table()[shard] = (totals.rows, totals.images, totals.tokens, totals.rejected)
