"""A request for one batch: small enough to send to a worker, and complete."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from vlmdata.context_parallel import Slice, chunk_ranges, concatenated_ranges
from vlmdata.families import Family
from vlmdata.format.dataset import VlmDataset
from vlmdata.format.shard import ABSENT
from vlmdata.loader.config import BatchPart, Pixels
from vlmdata.loader.request.arrays import BufferLayout
from vlmdata.loader.state import Position
from vlmdata.packing.image_owners import image_owners
from vlmdata.packing.plan.epoch import Pack

IntArray = npt.NDArray[np.int64]

#: Members with an entry per token, in storage order. Some samples lack ``loss_weights``.
TOKEN_MEMBERS = ("input_ids", "loss_mask", "loss_weights", "position_ids")


@dataclass(frozen=True, eq=False)
class SampleReads:
    """The k samples of a pack, in pack order, as columns, since a pack may have hundreds of short samples.

    Attributes:
        keys: Sample keys, k of them.
        dataset: int64 (k,), dataset numbers.
        shard: int64 (k,), shard numbers.
        row: int64 (k,), source rows, for messages and provenance.
        index: int64 (k,), positions in the dataset.
        lengths: int64 (k,), true lengths.
        padded: int64 (k,), stored lengths.
        begins: int64 (k,), first token of each sample's segment in the pack.
        offsets: int64 (4, k), offsets of the :data:`TOKEN_MEMBERS` in the shard; -1 for a missing member.
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

    def take(self, numbers: Collection[int]) -> SampleReads:
        """Returns some of the samples, by number in the pack."""
        chosen = np.fromiter(numbers, np.int64, len(numbers))
        columns = {each.name: getattr(self, each.name)[..., chosen] for each in fields(self) if each.name != "keys"}
        return SampleReads(keys=tuple(self.keys[number] for number in numbers), **columns)


@dataclass(frozen=True, eq=False)
class ImageReads:
    """The N images of a pack, in pack order.

    Attributes:
        sample: int64 (N,), number in the pack of each image's sample.
        grids: int64 (N, 3), (t, h, w) in patches.
        starts: int64 (N,), first token of each in the pack.
        offsets: int64 (N,), offset of each image in the shard.
        bytes: int64 (N,), stored bytes of each.
        checksums: uint64 (N,), their xxh3-64.
        pixel_checksums: uint64 (N,), xxh3-64 of each decoded image.
        codecs: Codec names of the N images.
    """

    sample: IntArray
    grids: IntArray
    starts: IntArray
    offsets: IntArray
    bytes: IntArray
    checksums: npt.NDArray[np.uint64]
    pixel_checksums: npt.NDArray[np.uint64]
    codecs: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class PackRequest:
    """A batch to make.

    Attributes:
        position: Position of the batch.
        following: Position of the next batch.
        pack: Pack number within the epoch, -1 for an empty pack.
        samples: The samples.
        images: All images of the pack.
        held: int64 (M,): images read here, ascending.
        cu_seqlens: int64 (segments + 1,).
        cu_seqlens_padded: int64 (segments + 1,).
        context_parallel: The slice of the pack held here; None means all of it.
        ranges: int64 (r, 2): token ranges of the pack held here, ascending.
        layout: Arrays to read, and their places in the batch's buffer.
        pixels: Dtype of the patches in the batch.
        pad_id: Token id of padding.
        image_id: Token id of image placeholders.
        family: The datasets' family.
    """

    position: Position
    following: Position
    pack: int
    samples: SampleReads
    images: ImageReads
    held: IntArray
    cu_seqlens: IntArray
    cu_seqlens_padded: IntArray
    context_parallel: Slice | None
    ranges: IntArray
    layout: BufferLayout
    pixels: Pixels
    pad_id: int
    image_id: int
    family: Family

    @property
    def total_tokens(self) -> int:
        """Tokens of the whole pack."""
        return int(self.cu_seqlens_padded[-1])

    def of(
        self, parts: Collection[BatchPart], context_parallel: Slice | None, images: IntArray | None = None
    ) -> PackRequest:
        """Returns the request for other parts or another slice of the same pack.

        Args:
            parts: Parts to read.
            context_parallel: The slice; None for the whole pack.
            images: Images to read, ascending, and no positions, as for a tower of its own; None means the images that
                the slice encodes.
        """
        bounds, grids = self.cu_seqlens_padded, self.images.grids
        if context_parallel is None:
            ranges, held = bounds[[[0, -1]]], np.arange(len(grids))
        else:
            rank, size = context_parallel.rank, context_parallel.size
            ranges = chunk_ranges(bounds, size, rank).reshape(-1, 2)
            held = np.flatnonzero(image_owners(grids, size) == rank)
        held = held if images is None else images
        layout = BufferLayout.of(
            parts,
            total_tokens=self.total_tokens,
            local_tokens=int((ranges[:, 1] - ranges[:, 0]).sum()),
            patches=int(grids[held].prod(axis=1).sum()),
            family=self.family,
            pixels=self.pixels,
            weighted=bool((self.samples.offsets[TOKEN_MEMBERS.index("loss_weights")] >= 0).any()),
            positions=images is None,
        )
        return replace(self, held=held, context_parallel=context_parallel, ranges=ranges, layout=layout)


def build_request(
    pack: Pack | None,
    datasets: Sequence[VlmDataset],
    *,
    number: int,
    position: Position,
    following: Position,
    empty_tokens: int,
    parts: Collection[BatchPart],
    pixels: Pixels,
    context_parallel: Slice | None = None,
) -> PackRequest:
    """Looks up the data to read for a pack.

    Args:
        pack: The pack, or None for an empty one.
        datasets: The datasets by number.
        number: The pack's number.
        position: Position of its batch.
        following: Position of the next batch.
        empty_tokens: Tokens in the single padding segment of an empty pack.
        parts: Parts that the rank needs.
        pixels: Dtype of the patches in the batch.
        context_parallel: The requested slice; None for the whole pack.
    """
    aligned = np.zeros(0, np.int64) if pack is None else pack.aligned_lengths
    samples, images = _reads(pack, datasets, np.cumsum(aligned) - aligned)
    tail = empty_tokens if pack is None else pack.tail
    bounds = _running_sum(aligned, tail or None)
    whole = PackRequest(
        position=position,
        following=following,
        pack=number,
        samples=samples,
        images=images,
        held=np.arange(0),
        cu_seqlens=_running_sum(samples.lengths, 0 if tail else None),
        cu_seqlens_padded=bounds,
        context_parallel=None,
        ranges=np.zeros((0, 2), np.int64),
        layout=BufferLayout((), 0),
        pixels=pixels,
        pad_id=datasets[0].manifest.tokenizer.pad,
        image_id=datasets[0].manifest.tokenizer.image,
        family=datasets[0].family,
    )
    return whole.of(parts, context_parallel)


def _reads(pack: Pack | None, datasets: Sequence[VlmDataset], begins: IntArray) -> tuple[SampleReads, ImageReads]:
    """Looks the samples up in the indices, one dataset at a time."""
    empty = np.zeros(0, np.int64)
    dataset = empty if pack is None else pack.dataset.astype(np.int64)
    index = empty if pack is None else pack.index
    # Packs are in storage order, so each dataset's samples are adjacent.
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
        pixel_checksums=column("pixel_checksums", np.uint64),
        codecs=tuple(column("image_codecs", np.object_).tolist()),
    )
    return samples, images


def _look_up(dataset: VlmDataset, chosen: IntArray, begins: IntArray, first: int) -> dict[str, npt.NDArray[Any]]:
    """Returns the columns of some samples of a dataset. The last axis is samples or images."""
    index = dataset.index
    image_begins = index.grid_offsets[chosen]
    counts = index.grid_offsets[chosen + 1] - image_begins
    owner = np.repeat(np.arange(len(chosen)), counts)
    images = concatenated_ranges(image_begins, counts)
    grids = index.grids[images].astype(np.int64)
    return {
        "shard": index.shard[chosen],
        "row": index.source_row[chosen],
        "lengths": index.lengths[chosen],
        "padded": index.padded_lengths[chosen],
        "offsets": _member_columns(index.data_offsets, chosen, ABSENT.offset),
        "checksums": _member_columns(index.member_checksums, chosen, ABSENT.checksum),
        "image_sample": owner + first,
        "image_grids": grids.T,
        "image_starts": index.image_starts[images] + begins[owner],
        "image_offsets": index.item_offsets[images],
        "image_bytes": index.item_bytes[images],
        "image_codecs": index.item_codecs[images],
        "image_checksums": index.image_checksums[images],
        "pixel_checksums": index.pixel_checksums[images],
    }


def _member_columns(columns: Mapping[str, npt.NDArray[Any]], chosen: IntArray, absent: int) -> npt.NDArray[Any]:
    """Returns a column of the token members of some samples, (4, k); ``absent`` for members not in the dataset."""
    rows = [columns[name][chosen] if name in columns else None for name in TOKEN_MEMBERS]
    filling = np.full_like(rows[0], absent)
    return np.array([filling if row is None else row for row in rows])


def _running_sum(lengths: IntArray, tail: int | None) -> IntArray:
    """Returns segment boundaries from 0. A tail is an additional segment."""
    bounds = np.zeros(len(lengths) + (1 if tail is None else 2), np.int64)
    np.cumsum(lengths, out=bounds[1 : len(lengths) + 1])
    if tail is not None:
        bounds[-1] = bounds[-2] + tail
    return bounds
