"""Requests for batches, small enough to send to workers: what to read of a pack, and where it goes.

A rank has a stream of them, from the plans of the epochs.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from vlmdata.context_parallel import Slice, chunk_ranges
from vlmdata.format.dataset import VlmDataset
from vlmdata.loader.config import BatchPart, Pixels
from vlmdata.loader.request.index_rows import IndexedPack, IntArray, indexed_pack, key_of
from vlmdata.loader.state import Position
from vlmdata.packing.config import PlanConfig
from vlmdata.packing.item_runs import ItemRuns, pack_runs, step_runs
from vlmdata.packing.plan.epoch import EpochPlan
from vlmdata.packing.plan.run import RunPlans
from vlmdata.packing.table import SampleTable

_ALIGN = 64
#: numpy has no bfloat16: its bits are integers of the same size.
_DTYPES: Mapping[Pixels, str] = {"uint8": "|u1", "bfloat16": "<i2", "float32": "<f4"}


@dataclass(frozen=True)
class PlacedArray:
    """An array of a batch at an offset in its buffer, in bytes."""

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    offset: int

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class BatchArrays:
    """The arrays of a batch, one after another in its buffer, each aligned to 64 bytes; ``bytes`` of all."""

    placed: tuple[PlacedArray, ...]
    bytes: int

    @property
    def has_patches(self) -> bool:
        """Whether one of them holds pixels."""
        return any(each.name == "patches" for each in self.placed)

    def views(self, buffer: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[np.generic]]:
        """Returns the arrays by name, as views of a buffer of at least ``bytes``."""
        return {
            each.name: buffer[each.offset : each.offset + each.bytes].view(each.dtype).reshape(each.shape)
            for each in self.placed
        }


@dataclass(frozen=True, eq=False)
class PackRequest:
    """A batch to make."""

    pack: IndexedPack
    position: Position
    following: Position  # of the next batch
    context_parallel: Slice | None  # the slice of the pack held here; None means all of it
    ranges: IntArray  # (r, 2), token ranges of the pack held here, ascending
    held: ItemRuns  # images and videos, and parts of videos, in the batch
    pixels: Pixels  # dtype of the patches in the batch
    arrays: BatchArrays  # to fill

    @classmethod
    def of(
        cls,
        pack: IndexedPack,
        position: Position,
        following: Position,
        parts: Collection[BatchPart],
        pixels: Pixels,
        context_parallel: Slice | None,
        runs: ItemRuns | None = None,
    ) -> PackRequest:
        """Returns the request for some parts of a pack or of a slice of it.

        ``runs`` are the images and videos to hold, without positions, as for a tower of its own; None means those that
        the slice encodes.
        """
        bounds, grids = pack.cu_seqlens_padded, pack.images.grids
        if context_parallel is None:
            ranges, held = bounds[[[0, -1]]], ItemRuns.whole(grids)
        else:
            rank, size = context_parallel.rank, context_parallel.size
            ranges = chunk_ranges(bounds, size, rank).reshape(-1, 2)
            held = pack_runs(grids, size).of(rank)
        held = held if runs is None else runs
        tokens = int((ranges[:, 1] - ranges[:, 0]).sum())
        arrays = _arrays(pack, parts, pixels, tokens, held, positions=runs is None)
        return cls(pack, position, following, context_parallel, ranges, held, pixels, arrays)

    @property
    def rows(self) -> IntArray:
        """int64 (N,), rows of pixels of each image and video of the pack in a batch."""
        return self.pack.images.rows_in_batch(_frames(self.pack, self.pixels))

    @property
    def read(self) -> IntArray:
        """int64, ascending numbers of the images and videos of which bytes are read: none without pixels."""
        return np.unique(self.held.items) if self.arrays.has_patches else np.zeros(0, np.int64)

    def whole(self, parts: Collection[BatchPart]) -> PackRequest:
        """Returns the request for some parts of the whole pack."""
        return PackRequest.of(self.pack, self.position, self.following, parts, self.pixels, None)


def _frames(pack: IndexedPack, pixels: Pixels) -> int:
    """Returns how many rows a patch of a video has in a batch: one for each frame, or all frames in one."""
    return pack.family.temporal_patch_size if pixels == "uint8" else 1


def _arrays(
    pack: IndexedPack, parts: Collection[BatchPart], pixels: Pixels, tokens: int, held: ItemRuns, positions: bool
) -> BatchArrays:
    """Places the arrays of some parts of a pack, of which so many tokens and these images and videos are held here."""
    wanted: list[tuple[str, str, tuple[int, ...]]] = [
        ("position_ids", "<i8", (len(pack.family.position_axes), 1, pack.total_tokens if positions else 0)),
        ("padding_mask", "|b1", (1, tokens)),
    ]
    if "tokens" in parts:
        wanted.append(("input_ids", "<i8", (1, tokens)))
    if "labels" in parts:
        wanted += [("labels", "<i8", (1, tokens)), ("loss_mask", "<f4", (1, tokens))]
        if pack.is_weighted:
            wanted.append(("loss_weights", "<f4", (1, tokens)))
    videos = pack.images.are_videos
    if videos.any():
        wanted.append(("video_block_starts", "<i8", (pack.video_blocks if positions else 0,)))
    if "pixels" in parts:
        frames = 1 if pixels == "uint8" else pack.family.temporal_patch_size
        rows = held.rows(pack.images.grids, pack.images.rows_in_batch(_frames(pack, pixels)))
        columns, of_videos = frames * pack.family.patch_bytes, videos[held.items]
        wanted.append(("patches", _DTYPES[pixels], (int(rows[~of_videos].sum()), columns)))
        if videos.any():
            wanted.append(("video_patches", _DTYPES[pixels], (int(rows[of_videos].sum()), columns)))
    placed, offset = [], 0
    for name, dtype, shape in wanted:
        array = PlacedArray(name, np.dtype(dtype), shape, offset)
        placed.append(array)
        offset += -(-array.bytes // _ALIGN) * _ALIGN
    return BatchArrays(tuple(placed), offset)


class EpochPlans:
    """:class:`~vlmdata.packing.plan.run.RunPlans` of datasets, thread-safe: a thread feeds the workers."""

    def __init__(
        self,
        table: SampleTable,
        config: PlanConfig,
        datasets: Sequence[VlmDataset],
        names: Sequence[str],
        known: tuple[int, int] | None = None,
    ):
        self.table = table
        self._runs = RunPlans(table, config, partial(key_of, table=table, datasets=datasets, names=names), known)
        self._lock = threading.Lock()  # an epoch is planned once, whoever asks

    @property
    def config(self) -> PlanConfig:
        """Settings without a schedule, which make the same plans as far as these are made."""
        return self._runs.config

    def __getitem__(self, epoch: int) -> EpochPlan:
        with self._lock:
            return self._runs[epoch]

    def steps_before(self, epoch: int) -> int:
        """Returns the optimizer steps of the run before an epoch. Plans the epochs before, if it must."""
        with self._lock:
            return self._runs.steps_before(epoch)

    def settled_before(self, epoch: int) -> PlanConfig:
        """Returns the given settings, with changes that were made before an epoch among the earlier ones."""
        with self._lock:
            return self._runs.settled_before(epoch)


@dataclass(frozen=True, eq=False)
class PackImages:
    """Boundaries, images and videos of a pack, and who encodes them."""

    cu_seqlens: IntArray  # int64 (segments + 1,), running sum of true lengths
    cu_seqlens_padded: IntArray  # int64 (segments + 1,), start of each segment
    grids: IntArray  # int64 (N, 3), patches of each image and video along t, h, w, in order of their tokens
    starts: IntArray  # int64 (N,), first token of each in the pack; the index has no other blocks of a video
    are_videos: npt.NDArray[np.bool_]  # bool (N,), which are videos
    runs: ItemRuns  # in which they are encoded; the owners are data-parallel ranks of the vision tower


@dataclass(frozen=True, eq=False)
class RankStream:
    """The batches of one rank: parts of all its packs, or of a slice of them.

    With ``vision_rank`` the rank is one of the ``vision_ranks`` of a vision tower on processes of its own. Its stream
    has the packs of all data-parallel ranks, each as a micro-batch of its own, with the images of this rank.
    """

    plans: EpochPlans
    datasets: Sequence[VlmDataset]
    dp_rank: int
    dp_size: int
    context_parallel: Slice | None
    parts: frozenset[BatchPart]
    pixels: Pixels
    vision_ranks: int = 0
    vision_rank: int | None = None

    def requests(self, start: Position) -> Iterator[PackRequest]:
        """Yields this rank's requests from a position on, epoch after epoch, endlessly."""
        epoch, step, micro_batch = start.epoch, start.step, start.micro_batch
        while True:
            plan = self.plans[epoch]
            while step < plan.num_steps:
                if self.vision_rank is None:
                    packs = plan.assignment(step, self.dp_size)[:, self.dp_rank].tolist()
                    for number in range(micro_batch, len(packs)):
                        here = Position(epoch, step, number)
                        pack, following = indexed_pack(plan, packs[number], self.datasets), next_of(here, plan, packs)
                        yield PackRequest.of(pack, here, following, self.parts, self.pixels, self.context_parallel)
                else:
                    yield from self._of_tower(plan, epoch, step, self.vision_rank)[micro_batch:]
                step, micro_batch = step + 1, 0
            epoch, step = epoch + 1, 0

    def images(self, epoch: int, step: int) -> tuple[tuple[PackImages, ...], ...]:
        """Returns the boundaries and items of all packs of a step, first by micro-batch, then by data-parallel rank.

        Reads the index only.

        Raises:
            IndexError: If the epoch has no such step.
        """
        found = [
            PackImages(
                pack.cu_seqlens,
                pack.cu_seqlens_padded,
                pack.images.grids,
                pack.images.starts,
                pack.images.are_videos,
                runs,
            )
            for pack, runs in self._all_of(self.plans[epoch], step)
        ]
        return tuple(tuple(found[start : start + self.dp_size]) for start in range(0, len(found), self.dp_size))

    def _of_tower(self, plan: EpochPlan, epoch: int, step: int, rank: int) -> list[PackRequest]:
        """Returns a step's requests of a rank of the tower; their positions count packs."""
        packs, requests = self._all_of(plan, step), []
        for number, (pack, runs) in enumerate(packs):
            here = Position(epoch, step, number)
            following = next_of(here, plan, packs)
            requests.append(PackRequest.of(pack, here, following, self.parts, self.pixels, None, runs.of(rank)))
        return requests

    def _all_of(self, plan: EpochPlan, step: int) -> list[tuple[IndexedPack, ItemRuns]]:
        """Returns the packs of all data-parallel ranks in a step, by micro-batch, and who encodes their images."""
        micro_batches = [
            [indexed_pack(plan, number, self.datasets) for number in numbers]
            for numbers in plan.assignment(step, self.dp_size).tolist()
        ]
        runs = step_runs([[pack.images.grids for pack in packs] for packs in micro_batches], max(self.vision_ranks, 1))
        return [
            each
            for packs, of_packs in zip(micro_batches, runs, strict=True)
            for each in zip(packs, of_packs, strict=True)
        ]


def next_of(position: Position, plan: EpochPlan, packs: Sequence[object]) -> Position:
    """Returns the position after another one, in a step with these packs, one per micro-batch."""
    if position.micro_batch + 1 < len(packs):
        return Position(position.epoch, position.step, position.micro_batch + 1)
    if position.step + 1 < plan.num_steps:
        return Position(position.epoch, position.step + 1)
    return Position(position.epoch + 1)
