"""Live counts of a run, for its progress display."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vlmdata.format.manifest import ShardInfo
from vlmdata.preprocess.shards.job import RowOutcome, ShardRecord
from vlmdata.reasons import Reason

_REASONS = tuple(Reason)
_COLUMN = {reason: column for column, reason in enumerate(_REASONS, start=4)}


@dataclass(frozen=True)
class Counts:
    """The rows read so far, images, true tokens and bytes of their samples, and rejects, the most frequent first."""

    rows: int
    images: int
    tokens: int
    bytes: int
    rejects: Mapping[str, int]

    @property
    def rejected(self) -> int:
        """Rejected candidates."""
        return sum(self.rejects.values())


class Counters:
    """Counts that workers write and the parent reads, without a lock that a dying worker could take along.

    Each shard has its own line in shared memory, written by the worker that makes it.
    """

    def __init__(self, shards: int):
        self._shared = multiprocessing.RawArray("q", shards * (4 + len(_REASONS)))
        self._begun = multiprocessing.RawArray("b", shards)

    def table(self) -> npt.NDArray[np.int64]:
        """int64 (shards, 4 + reasons): rows, images, tokens, bytes, and rejects by reason; a live view."""
        return np.frombuffer(self._shared, dtype=np.int64).reshape(-1, 4 + len(_REASONS))

    def sum(self) -> Counts:
        """The counts of all shards."""
        return counts_of(self.table().sum(axis=0))

    def start(self, shard: int) -> None:
        """Resets the counts of an earlier attempt at the shard."""
        self.table()[shard] = 0
        self._begun[shard] = 1

    def stop(self, shard: int) -> int | None:
        """Returns how many rows of a shard were done when its worker died; None if it had not begun the shard."""
        done = int(self.table()[shard, 0]) if self._begun[shard] else None
        self._begun[shard] = 0
        return done

    def add(self, shard: int, outcome: RowOutcome) -> None:
        """Counts a row."""
        line = self.table()[shard]
        line[0] += 1
        for sample in outcome.samples:
            line[1:4] += (len(sample.items), sample.length, sample.placement.size)
        for rejection in outcome.rejections:
            line[_COLUMN[rejection.reason]] += 1

    def finish(self, shard: int, record: ShardRecord) -> None:
        """Sets the counts of a shard that is whole."""
        totals = record.totals
        line = np.zeros(4 + len(_REASONS), dtype=np.int64)
        line[:4] = (totals.rows, totals.items, totals.tokens, totals.bytes)
        for reason, count in record.rejects.items():
            line[_COLUMN[Reason(reason)]] = count
        self.table()[shard] = line

    def keep(self, shard: int, info: ShardInfo) -> None:
        """Counts the rows of a shard of a finished dataset, of which no more is known here."""
        self.start(shard)
        self.table()[shard, 0] = info.row_stop - info.row_start


def counts_of(line: npt.NDArray[np.int64]) -> Counts:
    """A line of :meth:`Counters.table`, or a sum of some, by name."""
    rows, images, tokens, size, *rejects = line.tolist()
    named = {str(reason): count for reason, count in zip(_REASONS, rejects, strict=True) if count}
    return Counts(rows, images, tokens, size, dict(sorted(named.items(), key=lambda item: (-item[1], item[0]))))
