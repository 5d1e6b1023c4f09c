"""What must be read to make one batch: small enough to send to a worker, complete enough to need nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from typing import Any

import numpy as np
import numpy.typing as npt

from vlmdata.context_parallel import chunk_ranges
from vlmdata.families import Family
from vlmdata.format.dataset import VlmDataset
from vlmdata.format.shard import ABSENT
from vlmdata.packing.plan import Pack
from vlmdata.vision_split import image_owners

IntArray = npt.NDArray[np.int64]

#: Members with an entry per token, in the order in which they are stored. Some samples lack ``loss_weights``.
TOKEN_MEMBERS = ("input_ids", "loss_mask", "loss_weights", "position_ids")
_WEIGHTS = TOKEN_MEMBERS.index("loss_weights")


class Part(Flag):
    """What a rank needs of its batches."""

    TOKENS = auto()
    LABELS = auto()
    PIXELS = auto()


@dataclass(frozen=True, eq=False)
class SampleReads:
    """The k samples of a pack, in pack order, as columns: a pack may hold hundreds of short ones.

    Attributes:
        keys: Sample keys, k of them.
        dataset: int64 (k,), dataset numbers.
        shard: int64 (k,), shard numbers.
        row: int64 (k,), source rows, for messages and provenance.
        index: int64 (k,), positions in the dataset.
        lengths: int64 (k,), true lengths.
        padded: int64 (k,), stored lengths.
        begins: int64 (k,), first token of each sample's segment in the pack.
        offsets: int64 (4, k), first bytes of the :data:`TOKEN_MEMBERS` in the shard; -1 for a member it lacks.
        checksums: uint64 (4, k), their xxh3-64.
    """

    keys: tuple[str, ...]
    dataset: IntArray
    shard: IntArray
    row: IntArray
    index: IntArray
    lengths: IntArray
    padded: IntArray
    begins: IntArray
    offsets: IntArray
    checksums: npt.NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class ImageReads:
    """The N images of a pack, in pack order.

    Attributes:
        sample: int64 (N,), number in the pack of the sample each belongs to.
        grids: int64 (N, 3), (t, h, w) in patches.
        starts: int64 (N,), first token of each in the pack.
        offsets: int64 (N,), first stored byte of each image in the shard.
        bytes: int64 (N,), stored bytes of each.
        checksums: uint64 (N,), their xxh3-64.
        codecs: Name of the codec of each; N of them.
    """

    sample: IntArray
    grids: IntArray
    starts: IntArray
    offsets: IntArray
    bytes: IntArray
    checksums: npt.NDArray[np.uint64]
    codecs: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class PackRequest:
    """A batch to be made.

    Attributes:
        samples: The samples.
        images: All images of the pack.
        held: int64 (M,): which images are read here, ascending.
        cu_seqlens: int64 (segments + 1,).
        cu_seqlens_padded: int64 (segments + 1,).
        ranges: int64 (r, 2): token ranges of the pack held here, ascending.
        parts: What is read.
        pad_id: Token id of padding.
        family: The datasets' family.
    """

    samples: SampleReads
    images: ImageReads
    held: IntArray
    cu_seqlens: IntArray
    cu_seqlens_padded: IntArray
    ranges: IntArray
    parts: Part
    pad_id: int
    family: Family

    @property
    def total_tokens(self) -> int:
        """Tokens of the whole pack."""
        return int(self.cu_seqlens_padded[-1])

    @property
    def local_tokens(self) -> int:
        """Tokens held here."""
        return int((self.ranges[:, 1] - self.ranges[:, 0]).sum())

    @property
    def weighted(self) -> bool:
        """Whether the batch has loss weights of its own: a sample with targets that weigh other than 1."""
        return Part.LABELS in self.parts and bool((self.samples.offsets[_WEIGHTS] >= 0).any())

    @property
    def local_patches(self) -> int:
        """Patches held here."""
        return int(self.images.grids[self.held].prod(axis=1).sum()) if Part.PIXELS in self.parts else 0


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
    aligned = np.zeros(0, np.int64) if pack is None else pack.aligned_lengths
    samples, images = _reads(pack, datasets, np.cumsum(aligned) - aligned)
    tail = empty_tokens if pack is None else pack.tail
    cu_seqlens = _running_sum(samples.lengths, 0 if tail else None)
    cu_seqlens_padded = _running_sum(aligned, tail or None)
    if cp_rank is None:
        ranges = cu_seqlens_padded[[[0, -1]]]
        held = np.arange(len(images.grids))
    else:
        ranges = chunk_ranges(cu_seqlens_padded, cp_size, cp_rank).reshape(-1, 2)
        held = np.flatnonzero(image_owners(images.grids, cp_size) == cp_rank)
    return PackRequest(samples, images, held, cu_seqlens, cu_seqlens_padded, ranges, parts, pad_id, datasets[0].family)


def _reads(pack: Pack | None, datasets: Sequence[VlmDataset], begins: IntArray) -> tuple[SampleReads, ImageReads]:
    """Looks the samples up in the indices, a dataset at a time."""
    empty = np.zeros(0, np.int64)
    dataset = empty if pack is None else pack.dataset.astype(np.int64)
    index = empty if pack is None else pack.index
    # Packs are in storage order, so each dataset's samples stand together.
    bounds = np.searchsorted(dataset, np.arange(len(datasets) + 1))
    keys: list[str] = []
    found: list[dict[str, npt.NDArray[Any]]] = []
    for number in np.flatnonzero(np.diff(bounds)).tolist():
        group = slice(int(bounds[number]), int(bounds[number + 1]))
        keys += datasets[number].index.keys.take(index[group]).to_pylist()
        found.append(_look_up(datasets[number], index[group], begins[group], group.start))

    def column(name: str, dtype: type[np.generic] = np.int64, shape: tuple[int, ...] = (0,)) -> npt.NDArray[Any]:
        columns = [group[name] for group in found] or [np.zeros(shape)]
        joined = columns[0] if len(columns) == 1 else np.concatenate(columns, axis=-1)
        return joined.astype(dtype, copy=False)

    samples = SampleReads(
        keys=tuple(keys),
        dataset=dataset,
        shard=column("shard"),
        row=column("row"),
        index=index,
        lengths=column("lengths"),
        padded=column("padded"),
        begins=begins,
        offsets=column("offsets", shape=(len(TOKEN_MEMBERS), 0)),
        checksums=column("checksums", np.uint64, (len(TOKEN_MEMBERS), 0)),
    )
    images = ImageReads(
        sample=column("image_sample"),
        grids=np.ascontiguousarray(column("image_grids", shape=(3, 0)).T),
        starts=column("image_starts"),
        offsets=column("image_offsets"),
        bytes=column("image_bytes"),
        checksums=column("image_checksums", np.uint64),
        codecs=tuple(column("image_codecs", np.object_).tolist()),
    )
    return samples, images


def _look_up(dataset: VlmDataset, chosen: IntArray, begins: IntArray, first: int) -> dict[str, npt.NDArray[Any]]:
    """The columns of some samples of one dataset; the last axis counts samples, or images."""
    index = dataset.index
    image_begins = index.grid_offsets[chosen]
    counts = index.grid_offsets[chosen + 1] - image_begins
    owner = np.repeat(np.arange(len(chosen)), counts)
    images = _concatenated_ranges(image_begins, counts)
    grids = index.grids[images].astype(np.int64)
    return {
        "shard": index.shard[chosen],
        "row": index.source_row[chosen],
        "lengths": index.lengths[chosen],
        "padded": index.padded_lengths[chosen],
        "offsets": _member_columns(index.data_offsets, chosen, ABSENT.offset),
        "checksums": _member_columns(index.token_checksums, chosen, ABSENT.checksum),
        "image_sample": owner + first,
        "image_grids": grids.T,
        "image_starts": index.image_starts[images] + begins[owner],
        "image_offsets": index.item_offsets[images],
        "image_bytes": index.item_bytes[images],
        "image_codecs": index.item_codecs[images],
        "image_checksums": index.image_checksums[images],
    }


def _member_columns(columns: Mapping[str, npt.NDArray[Any]], chosen: IntArray, absent: int) -> npt.NDArray[Any]:
    """A fact of the token members of some samples, (4, k); ``absent`` for a member that the dataset lacks."""
    rows = [columns[name][chosen] if name in columns else None for name in TOKEN_MEMBERS]
    filling = np.full_like(rows[0], absent)
    return np.array([filling if row is None else row for row in rows])


def _running_sum(lengths: IntArray, tail: int | None) -> IntArray:
    """Segment boundaries, from 0; a tail is one more segment."""
    bounds = np.zeros(len(lengths) + (1 if tail is None else 2), np.int64)
    np.cumsum(lengths, out=bounds[1 : len(lengths) + 1])
    if tail is not None:
        bounds[-1] = bounds[-2] + tail
    return bounds


def _concatenated_ranges(starts: IntArray, lengths: IntArray) -> IntArray:
    """Concatenates ``arange(start, start + length)`` over all pairs."""
    before = np.cumsum(lengths) - lengths
    ranges: IntArray = np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)
    return ranges
