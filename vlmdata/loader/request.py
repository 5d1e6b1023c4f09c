"""What must be read to make one batch: small enough to send to a worker, complete enough to need nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Flag, auto

import numpy as np
import numpy.typing as npt

from vlmdata.context_parallel import chunk_ranges
from vlmdata.format.dataset import VlmDataset
from vlmdata.packing.plan import Pack
from vlmdata.vision_split import image_owners

IntArray = npt.NDArray[np.int64]


class Part(Flag):
    """What a rank needs of its batches."""

    TOKENS = auto()
    LABELS = auto()
    PIXELS = auto()


@dataclass(frozen=True)
class SampleRead:
    """One sample's bytes.

    Attributes:
        dataset: Dataset number.
        shard: Shard number.
        row: Source row, for messages and provenance.
        index: Position in the dataset.
        key: Sample key.
        length: True length.
        padded: Stored length.
        begin: First token of its segment in the pack.
        grids: (t, h, w) of its images.
        image_starts: First token of each image within the sample.
        offsets: First bytes of input_ids, loss_mask, position_ids and patches in the shard.
        checksums: xxh3-64 of input_ids, loss_mask and position_ids.
        image_checksums: xxh3-64 of each image's patches.
    """

    dataset: int
    shard: int
    row: int
    index: int
    key: str
    length: int
    padded: int
    begin: int
    grids: tuple[tuple[int, int, int], ...]
    image_starts: tuple[int, ...]
    offsets: tuple[int, int, int, int]
    checksums: tuple[int, int, int]
    image_checksums: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class PackRequest:
    """A batch to be made.

    Attributes:
        samples: The samples in pack order.
        cu_seqlens: int64 (segments + 1,).
        cu_seqlens_padded: int64 (segments + 1,).
        grids: int64 (N, 3), all images of the pack.
        images: int64 (M,), which of them are read here.
        ranges: int64 (r, 2): token ranges of the pack held here, ascending.
        parts: What is read.
        pad_id: Token id of padding.
    """

    samples: tuple[SampleRead, ...]
    cu_seqlens: IntArray
    cu_seqlens_padded: IntArray
    grids: IntArray
    images: IntArray
    ranges: IntArray
    parts: Part
    pad_id: int

    @property
    def total_tokens(self) -> int:
        """Tokens of the whole pack."""
        return int(self.cu_seqlens_padded[-1])

    @property
    def local_tokens(self) -> int:
        """Tokens held here."""
        return int((self.ranges[:, 1] - self.ranges[:, 0]).sum())

    @property
    def local_patches(self) -> int:
        """Patches held here."""
        return int(self.grids[self.images].prod(axis=1).sum()) if Part.PIXELS in self.parts else 0

    @property
    def image_starts(self) -> IntArray:
        """First token of each image in the pack, int64 (N,)."""
        starts = [sample.begin + start for sample in self.samples for start in sample.image_starts]
        return np.array(starts, dtype=np.int64)


_READ = ("input_ids", "loss_mask", "position_ids", "patches")


def build_request(
    pack: Pack | None,
    datasets: Sequence[VlmDataset],
    *,
    empty_tokens: int,
    parts: Part,
    pad_id: int,
    cp_rank: int | None = None,
    cp_size: int = 1,
) -> PackRequest:
    """What to read for a pack.

    Args:
        pack: The pack, or None for an empty one.
        datasets: The datasets by number.
        empty_tokens: Tokens of an empty pack's one segment, all padding.
        parts: What the rank needs.
        pad_id: Token id of padding.
        cp_rank: Context-parallel rank whose slice is wanted; None for whole packs.
        cp_size: Context-parallel size.
    """
    samples: list[SampleRead] = []
    lengths: list[int] = []
    padded: list[int] = []
    begin = 0
    if pack is not None:
        for dataset, index, aligned in zip(
            pack.dataset.tolist(), pack.index.tolist(), pack.aligned_lengths.tolist(), strict=True
        ):
            read = _sample_read(datasets[dataset], dataset, index, begin)
            samples.append(read)
            lengths.append(read.length)
            padded.append(aligned)
            begin += aligned
    tail = empty_tokens if pack is None else pack.tail
    if tail:
        lengths.append(0)
        padded.append(tail)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    cu_seqlens_padded = np.concatenate([[0], np.cumsum(padded)]).astype(np.int64)
    grids = np.array([grid for sample in samples for grid in sample.grids], dtype=np.int64).reshape(-1, 3)
    if cp_rank is None:
        ranges = np.array([[0, cu_seqlens_padded[-1]]], dtype=np.int64)
        images = np.arange(len(grids))
    else:
        ranges = chunk_ranges(cu_seqlens_padded, cp_size, cp_rank).reshape(-1, 2)
        images = np.flatnonzero(image_owners(grids, cp_size) == cp_rank)
    return PackRequest(tuple(samples), cu_seqlens, cu_seqlens_padded, grids, images, ranges, parts, pad_id)


def _sample_read(dataset: VlmDataset, number: int, i: int, begin: int) -> SampleRead:
    index = dataset.index
    images = slice(int(index.grid_offsets[i]), int(index.grid_offsets[i + 1]))
    a, b, c, d = (int(index.data_offsets[name][i]) for name in _READ)
    x, y, z = (int(index.token_checksums[name][i]) for name in _READ[:3])
    return SampleRead(
        dataset=number,
        shard=int(index.shard[i]),
        row=int(index.source_row[i]),
        index=i,
        key=index.key(i),
        length=int(index.lengths[i]),
        padded=int(index.padded_lengths[i]),
        begin=begin,
        grids=tuple((t, h, w) for t, h, w in index.grids[images].tolist()),
        image_starts=tuple(index.image_starts[images].tolist()),
        offsets=(a, b, c, d),
        checksums=(x, y, z),
        image_checksums=tuple(index.image_checksums[images].tolist()),
    )
