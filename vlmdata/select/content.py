"""What samples hold, as the checksums of the index tell it: equal under every codec, and without reading a shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from vlmdata.format.index import DatasetIndex

#: Parts of a sample that are compared, with the members of each; ``images`` are the items with their grids.
PARTS = {
    "tokens": ("input_ids",),
    "targets": ("loss_mask",),
    "weights": ("loss_weights",),
    "positions": ("position_ids",),
    "images": (),
}


def digests(index: DatasetIndex, part: str) -> npt.NDArray[np.uint64]:
    """Returns a hash of one part of each sample.

    Args:
        index: The index.
        part: One of :data:`PARTS`.

    Returns:
        uint64 (n,): xxh3-64. Samples without images, or without weights, have 0.
    """
    if part == "images":
        return _of_images(index)
    (member,) = PARTS[part]
    if member not in index.member_checksums:
        return np.zeros(len(index), np.uint64)
    return index.member_checksums[member].astype(np.uint64)


def combined(columns: Sequence[npt.NDArray[np.uint64]]) -> npt.NDArray[np.uint64]:
    """Returns one hash of several for each sample, uint64 (n,)."""
    rows = np.ascontiguousarray(np.stack(columns, axis=1))
    return np.fromiter((xxhash.xxh3_64_intdigest(row.data) for row in rows), np.uint64, len(rows))


def content(index: DatasetIndex) -> npt.NDArray[np.uint64]:
    """Returns a hash of all parts of each sample, uint64 (n,)."""
    return combined([digests(index, part) for part in PARTS])


def _of_images(index: DatasetIndex) -> npt.NDArray[np.uint64]:
    shapes = np.concatenate([index.grids, index.item_copies[:, None]], axis=1).astype(np.uint64)
    items = np.ascontiguousarray(np.concatenate([index.pixel_checksums[:, None], shapes], axis=1))

    def hashes() -> Iterator[int]:
        for first, stop in zip(index.grid_offsets[:-1].tolist(), index.grid_offsets[1:].tolist(), strict=True):
            yield xxhash.xxh3_64_intdigest(items[first:stop].data) if stop > first else 0

    return np.fromiter(hashes(), np.uint64, len(index))
