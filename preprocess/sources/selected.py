"""A selection of rows of a source, one bit per row, so that it is small to send to workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

_CHUNK = 1 << 13  # rows


@dataclass(frozen=True, eq=False)
class SelectedRows(Sequence[int]):
    """Ascending row numbers."""

    bits: npt.NDArray[np.uint8]  # uint8 (ceil(rows / 8),) as packed by numpy: 1 where the row is chosen
    counts: npt.NDArray[np.int64]  # int64 (chunks + 1,) number of chosen rows before each chunk, and in total

    @classmethod
    def of(cls, mask: npt.NDArray[np.bool_]) -> SelectedRows:
        """Selects the rows where the mask is True."""
        starts = np.arange(0, len(mask), _CHUNK)
        counts = np.add.reduceat(mask, starts, dtype=np.int64) if len(mask) else np.zeros(0, np.int64)
        return cls(np.packbits(mask), np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))

    def __len__(self) -> int:
        return int(self.counts[-1])

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise ValueError(f"row numbers are read in ascending order, not with a step of {step}")
            return [int(number) for number in self.between(start, max(start, stop))]
        at = range(len(self))[index]
        return int(self.between(at, at + 1)[0])

    def __iter__(self) -> Iterator[int]:
        for chunk in range(len(self.counts) - 1):
            yield from self._chunk(chunk).tolist()

    def between(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Returns the chosen rows from the ``start``-th to before the ``stop``-th, int64 (stop - start,)."""
        first = int(np.searchsorted(self.counts, start, "right")) - 1
        last = int(np.searchsorted(self.counts, stop, "left"))
        chunks = [self._chunk(chunk) for chunk in range(first, last)]
        before = int(self.counts[first])
        return np.concatenate([np.zeros(0, np.int64), *chunks])[start - before : stop - before]

    def _chunk(self, chunk: int) -> npt.NDArray[np.int64]:
        packed = self.bits[chunk * _CHUNK // 8 : (chunk + 1) * _CHUNK // 8]
        return np.flatnonzero(np.unpackbits(packed)) + chunk * _CHUNK
