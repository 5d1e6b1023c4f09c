"""All that the loader reads of the datasets' indices: the planner's columns, the rows of a pack, names for messages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from vlmdata.context_parallel import concatenated_ranges
from vlmdata.errors import DatasetFormatError
from vlmdata.families import Family
from vlmdata.families.blocks import Blocks
from vlmdata.families.chat import VIDEO
from vlmdata.format.dataset import VlmDataset
from vlmdata.format.shard import ABSENT
from vlmdata.loader.config import DEFAULT_CAPACITY
from vlmdata.loader.state import DamagedSample, SampleId
from vlmdata.media.codecs import ItemShape
from vlmdata.packing.plan.epoch import EMPTY_PACK, EpochPlan, Pack
from vlmdata.packing.table import SampleTable, concatenate_tables, table_from_columns
from vlmdata.storage.shards import DatasetShards

IntArray = npt.NDArray[np.int64]

#: Members with an entry per token, in storage order. Some samples lack ``loss_weights``.
TOKEN_MEMBERS = ("input_ids", "loss_mask", "loss_weights", "position_ids")
_WEIGHTS = TOKEN_MEMBERS.index("loss_weights")


type _Columns = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, eq=False)
class SampleRows:
    """The k samples of a pack, in pack order, as columns, since a pack may have hundreds of short samples."""

    keys: tuple[str, ...]
    dataset: IntArray  # (k,), dataset numbers
    shard: IntArray  # (k,), shard numbers
    row: IntArray  # (k,), source rows, for messages and provenance
    index: IntArray  # (k,), numbers in the dataset
    lengths: IntArray  # (k,), true lengths
    padded: IntArray  # (k,), stored lengths
    begins: IntArray  # (k,), first token of each sample's segment in the pack
    offsets: IntArray  # (4, k), offsets of the TOKEN_MEMBERS in the shard; -1 for a missing member
    checksums: npt.NDArray[np.uint64]  # (4, k), their xxh3-64

    def take(self, numbers: Collection[int]) -> SampleRows:
        """Returns some of the samples, by number in the pack."""
        chosen = np.fromiter(numbers, np.int64, len(numbers))
        columns = {each.name: getattr(self, each.name)[..., chosen] for each in fields(self) if each.name != "keys"}
        return SampleRows(keys=tuple(self.keys[number] for number in numbers), **columns)


@dataclass(frozen=True, eq=False)
class ItemRows:
    """The N items of a pack, images and videos, in pack order. Messages call both images."""

    sample: IntArray  # (N,), number in the pack of each image's sample
    number: IntArray  # (N,), number of each image in its sample, for messages
    grids: IntArray  # (N, 3), (t, h, w) in patches
    starts: IntArray  # (N,), first token of each in the pack
    offsets: IntArray  # (N,), offset of each image in the shard
    bytes: IntArray  # (N,), stored bytes of each
    checksums: npt.NDArray[np.uint64]  # (N,), their xxh3-64
    pixel_checksums: npt.NDArray[np.uint64]  # (N,), xxh3-64 of each decoded image
    codecs: tuple[str, ...]
    kinds: tuple[str, ...]  # image or video
    copies: IntArray  # (N,), temporal copies stored of each patch

    def shape(self, image: int) -> ItemShape:
        """Kind, grid and copies of an image."""
        t, h, w = self.grids[image].tolist()
        return ItemShape(self.kinds[image], (t, h, w), int(self.copies[image]))

    @cached_property
    def are_videos(self) -> npt.NDArray[np.bool_]:
        """Which are videos, bool (N,)."""
        return np.array([kind == VIDEO for kind in self.kinds], np.bool_)

    @property
    def rows(self) -> IntArray:
        """int64 (N,), rows of stored pixels of each."""
        return self.grids.prod(axis=1) * self.copies

    def rows_in_batch(self, frames: int) -> IntArray:
        """int64 (N,), rows of pixels of each in a batch.

        Args:
            frames: Frames of a patch of a video that are rows of their own; 1 if they are columns of one row.
        """
        return self.grids.prod(axis=1) * np.where(self.are_videos, frames, 1)


@dataclass(frozen=True, eq=False)
class IndexedPack:
    """A pack with what the indices say of its samples and images."""

    number: int  # within the epoch, -1 for an empty pack
    samples: SampleRows
    images: ItemRows
    cu_seqlens: IntArray  # (segments + 1,), running sum of true lengths
    cu_seqlens_padded: IntArray  # (segments + 1,), start of each segment
    pad_id: int  # token id of padding
    placeholders: Mapping[str, tuple[int, ...]]  # of each kind of items: see :attr:`TokenizerInfo.placeholders`
    family: Family

    @property
    def total_tokens(self) -> int:
        """Tokens of the pack."""
        return int(self.cu_seqlens_padded[-1])

    @cached_property
    def video_blocks(self) -> int:
        """Number of blocks of all videos: runs of placeholders."""
        videos = self.images.grids[self.images.are_videos].tolist()
        return sum(len(self.family.expansion(VIDEO).blocks((t, h, w))) for t, h, w in videos)

    def blocks(self, items: npt.NDArray[np.bool_]) -> Blocks:
        """Returns the blocks of placeholders of some items, bool (N,)."""
        kinds = [self.images.kinds[number] for number in np.flatnonzero(items).tolist()]
        grids = [(t, h, w) for t, h, w in self.images.grids[items].tolist()]
        return Blocks.of(self.family, list(zip(kinds, grids, strict=True)), self.placeholders)

    @property
    def is_weighted(self) -> bool:
        """Whether a sample has loss weights that may differ from its loss mask."""
        return bool((self.samples.offsets[_WEIGHTS] >= 0).any())


#: The columns of no samples and no images, with the dtypes of all.
_NO_SAMPLES: _Columns = {name: np.zeros(0, np.int64) for name in ("shard", "row", "lengths", "padded")} | {
    "offsets": np.zeros((len(TOKEN_MEMBERS), 0), np.int64),
    "checksums": np.zeros((len(TOKEN_MEMBERS), 0), np.uint64),
}
_NO_IMAGES: _Columns = {
    name: np.zeros(0, np.int64) for name in ("sample", "number", "starts", "offsets", "bytes", "copies")
} | {
    "grids": np.zeros((3, 0), np.int64),
    "checksums": np.zeros(0, np.uint64),
    "pixel_checksums": np.zeros(0, np.uint64),
    "codecs": np.zeros(0, np.object_),
    "kinds": np.zeros(0, np.object_),
}


def indexed_pack(plan: EpochPlan, number: int, datasets: Sequence[VlmDataset]) -> IndexedPack:
    """Looks up the samples and images of a pack of a plan; ``EMPTY_PACK`` is a single segment of padding."""
    if number == EMPTY_PACK:
        none, config = np.zeros(0, np.int64), plan.config
        tail = config.capacity if config.pad_to_capacity else config.alignment
        pack = Pack(none, none.astype(np.int32), none.astype(np.int32), none, none, tail)
    else:
        pack = plan.pack(number)
    begins = np.cumsum(pack.aligned_lengths) - pack.aligned_lengths
    samples, images = _rows(pack, datasets, begins)
    tokenizer = datasets[0].manifest.tokenizer
    return IndexedPack(
        number=number,
        samples=samples,
        images=images,
        cu_seqlens=_running_sum(samples.lengths, 0 if pack.tail else None),
        cu_seqlens_padded=_running_sum(pack.aligned_lengths, pack.tail or None),
        pad_id=tokenizer.pad,
        placeholders=tokenizer.placeholders,
        family=datasets[0].family,
    )


def _rows(pack: Pack, datasets: Sequence[VlmDataset], begins: IntArray) -> tuple[SampleRows, ItemRows]:
    """Looks the samples up in the indices, one dataset at a time."""
    dataset = pack.dataset.astype(np.int64)
    # Packs are in storage order, so each dataset's samples are adjacent.
    bounds = np.searchsorted(dataset, np.arange(len(datasets) + 1))
    keys: list[str] = []
    of_samples, of_images = [_NO_SAMPLES], [_NO_IMAGES]
    for number in np.flatnonzero(np.diff(bounds)).tolist():
        group = slice(int(bounds[number]), int(bounds[number + 1]))
        keys += datasets[number].index.keys_of(pack.index[group])
        found = _columns(datasets[number], pack.index[group], begins[group], group.start)
        of_samples.append(found[0])
        of_images.append(found[1])
    samples = SampleRows(keys=tuple(keys), dataset=dataset, index=pack.index, begins=begins, **_joined(of_samples))
    images = _joined(of_images)
    images |= {"grids": np.ascontiguousarray(images["grids"].T)}
    images |= {name: tuple(images[name].tolist()) for name in ("codecs", "kinds")}
    return samples, ItemRows(**images)


def _joined(groups: Sequence[_Columns]) -> dict[str, Any]:
    """Joins columns along their last axis; the first group is empty and has their dtypes."""
    if len(groups) == 2:  # samples of one dataset, as usual
        return {name: groups[1][name].astype(like.dtype, copy=False) for name, like in groups[0].items()}
    return {
        name: np.concatenate([each[name] for each in groups], axis=-1, dtype=like.dtype)
        for name, like in groups[0].items()
    }


def _columns(dataset: VlmDataset, chosen: IntArray, begins: IntArray, first: int) -> tuple[_Columns, _Columns]:
    """Returns the columns of some samples of a dataset and of their images, which are the last axis."""
    index = dataset.index
    image_begins = index.grid_offsets[chosen]
    counts = index.grid_offsets[chosen + 1] - image_begins
    owner = np.repeat(np.arange(len(chosen)), counts)
    images = concatenated_ranges(image_begins, counts)
    samples: _Columns = {
        "shard": index.shard[chosen],
        "row": index.source_row[chosen],
        "lengths": index.lengths[chosen],
        "padded": index.padded_lengths[chosen],
        "offsets": _member_columns(index.data_offsets, chosen, ABSENT.offset),
        "checksums": _member_columns(index.member_checksums, chosen, ABSENT.checksum),
    }
    return samples, {
        "sample": owner + first,
        "number": images - image_begins[owner],
        "grids": index.grids[images].T,
        "starts": index.item_starts[images] + begins[owner],
        "offsets": index.item_offsets[images],
        "bytes": index.item_bytes[images],
        "checksums": index.item_checksums[images],
        "pixel_checksums": index.pixel_checksums[images],
        "codecs": index.item_codecs[images],
        "kinds": index.item_kinds[images],
        "copies": index.item_copies[images],
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


def sample_table(datasets: Sequence[VlmDataset]) -> SampleTable:
    """Concatenates the planner columns of all datasets; a DatasetFormatError if one has no samples."""
    for dataset in datasets:
        if len(dataset) == 0:
            raise DatasetFormatError(f"{dataset.name}: has no samples (all rows were rejected?)")
    indices = [dataset.index for dataset in datasets]
    return concatenate_tables(
        [
            table_from_columns(each.lengths, each.num_targets, each.grids, each.grid_offsets, np.asarray(each.shard))
            for each in indices
        ]
    )


def default_capacity(datasets: Sequence[VlmDataset]) -> int:
    """Returns the default capacity: 8,192 tokens, or the longest sample rounded up to a multiple of 1,024.

    Raises:
        DatasetFormatError: If there are no samples.
    """
    longest = max((int(np.max(dataset.index.lengths, initial=0)) for dataset in datasets), default=0)
    if longest == 0:
        raise DatasetFormatError(f"{datasets[0].name}: has no samples (all rows were rejected?)")
    return max(DEFAULT_CAPACITY, -(-longest // 1024) * 1024)


def named_samples(
    ids: Iterable[SampleId], datasets: Sequence[VlmDataset], shards: Sequence[DatasetShards]
) -> tuple[DamagedSample, ...]:
    """Returns file, row and key of damaged samples, in order of dataset and number, each once."""
    found = []
    for dataset, number in sorted(set(ids)):
        index, files = datasets[dataset].index, shards[dataset]
        file = f"{files.name}/{files.files[int(index.shard[number])].name}"
        found.append(DamagedSample(dataset, number, file, int(index.source_row[number]), index.key(number)))
    return tuple(found)


def key_of(sample: int, table: SampleTable, datasets: Sequence[VlmDataset], names: Sequence[str]) -> str:
    """Returns the key of a sample of the table for messages, with its dataset's name if there are several."""
    dataset = int(table.dataset[sample])
    key = datasets[dataset].index.key(sample - int(table.dataset_offsets()[dataset]))
    return key if len(datasets) == 1 else f"{names[dataset]}:{key}"
