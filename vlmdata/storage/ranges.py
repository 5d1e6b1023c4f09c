"""Byte ranges of shards in object storage: those that a batch needs, fetched together and kept until it is made."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vlmdata.storage.download import ByteRange, read_ranges

#: Bytes between two ranges of a shard that are fetched, too, to save a request.
_READ_THROUGH = 256 * 1024


@dataclass(frozen=True)
class RemoteRanges:
    """Shards at a dataset's fsspec URL of which byte ranges are read. Nothing is cached."""

    url: str


@dataclass(frozen=True, eq=False)
class Extents:
    """Byte ranges ``[start, stop)`` of numbered datasets and shards, as columns (r,) of int64."""

    dataset: npt.NDArray[np.int64]
    shard: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    stop: npt.NDArray[np.int64]

    def joined(self) -> Extents:
        """Returns these bytes in order, and in few ranges: near ones are joined."""
        order = np.lexsort((self.start, self.shard, self.dataset))
        dataset, shard, start = self.dataset[order], self.shard[order], self.start[order]
        # Within a shard, the furthest byte so far. Adding a shard's number times more than any offset separates shards.
        apart = np.cumsum(np.concatenate([[0], (np.diff(dataset) != 0) | (np.diff(shard) != 0)])[: len(order)])
        stride = int(self.stop.max(initial=0)) + _READ_THROUGH + 1
        furthest = np.maximum.accumulate(self.stop[order] + apart * stride)
        begins = np.concatenate([[True], (start + apart * stride)[1:] > furthest[:-1] + _READ_THROUGH])[: len(order)]
        first = np.flatnonzero(begins)
        last = np.concatenate([first[1:], [len(order)]])[: len(first)] - 1
        return Extents(dataset[first], shard[first], start[first], (furthest - apart * stride)[last])


class FetchedRanges:
    """Bytes of shards in memory, fetched from ``urls`` by dataset; ``names`` are all shards of each dataset."""

    def __init__(self, urls: Mapping[int, str], names: Sequence[Sequence[str]]):
        self._urls = urls
        self._names = names
        self._found: dict[tuple[int, int], tuple[list[int], list[bytes]]] = {}

    def fetch(self, extents: Extents) -> None:
        """Fetches ranges at once. Forgets those of earlier calls.

        Raises:
            DatasetFormatError: If a range cannot be fetched.
        """
        self._found = {}
        joined = extents.joined()
        for dataset, url in self._urls.items():
            own = joined.dataset == dataset
            columns = (joined.shard[own], joined.start[own], joined.stop[own])
            wanted = [(shard, start, stop) for shard, start, stop in zip(*(c.tolist() for c in columns), strict=True)]
            contents = read_ranges(url, [ByteRange(self._names[dataset][n], a, b) for n, a, b in wanted])
            for (shard, start, _), content in zip(wanted, contents, strict=True):
                starts, pieces = self._found.setdefault((dataset, shard), ([], []))
                starts.append(start)
                pieces.append(content)

    def forget(self) -> None:
        """Frees the memory."""
        self._found = {}

    def copy(self, dataset: int, shard: int, offset: int, into: memoryview) -> None:
        """Copies bytes that were fetched."""
        starts, pieces = self._found[dataset, shard]
        at = bisect.bisect_right(starts, offset) - 1
        begin = offset - starts[at]
        into[:] = memoryview(pieces[at])[begin : begin + into.nbytes]
