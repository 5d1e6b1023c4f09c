"""Chooses a few samples of a dataset, and lays them out as batches: each alone, and all in packs of two orders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vlmdata.batch import IGNORE_INDEX, PackedBatch, SampleOrigin
from vlmdata.errors import UsageError
from vlmdata.families import Family
from vlmdata.families.blocks import Blocks, are_placeholders
from vlmdata.families.chat import IMAGE, VIDEO
from vlmdata.format.dataset import VlmDataset
from vlmdata.format.schema import Sample

#: Samples of a pack.
_MOST = 4
#: Samples shorter than this show little.
_SHORT = 8
#: Rows of each kind: patches, tokens of the merger, and items.
UNITS_OF = {IMAGE: ("patch", "merged", "image"), VIDEO: ("video patch", "merged of videos", "video")}
#: Samples are padded to multiples of this in packs, as a parallel layout does.
_ALIGNMENT = 4


@dataclass(frozen=True)
class SampleSpans:
    """The rows of one sample in the tensors of a pack, for each thing that a tensor may have one row of.

    Attributes:
        key: Key of the sample.
        spans: [begin, end) by what is counted: ``token``, ``target``, and for images and for videos the units of
            :data:`UNITS_OF`.
    """

    key: str
    spans: dict[str, tuple[int, int]]

    def count(self, unit: str) -> int:
        """Rows of the sample."""
        begin, end = self.spans[unit]
        return end - begin


@dataclass(frozen=True, eq=False)
class SampleBatch:
    """A batch of chosen samples.

    Attributes:
        batch: The batch, on the CPU.
        samples: Numbers of its samples among the chosen ones.
        rows: Where each of them lies.
        totals: Rows of the batch by what is counted.
        seconds: Seconds per temporal patch of each video.
        longest_image: Patches of the largest image of all chosen samples.
    """

    batch: PackedBatch
    samples: tuple[int, ...]
    rows: tuple[SampleSpans, ...]
    totals: dict[str, int]
    seconds: tuple[float, ...] = ()
    longest_image: int = 0

    @property
    def vision_tokens(self) -> torch.Tensor:
        """Returns bool (T,), the placeholders of images and videos."""
        found = torch.zeros(self.batch.total_tokens, dtype=torch.bool)
        host, family = self.batch.host, self.batch.family
        grids = [tuple(grid) for grid in host.image_grid_thw.tolist()]
        if len(host.video_grid_thw):  # a family may have no videos
            expansion = family.expansion(VIDEO)
            grids += [block for grid in host.video_grid_thw.tolist() for block in expansion.blocks(tuple(grid))]
        starts = [*host.image_starts.tolist(), *host.video_block_starts.tolist()]
        for start, count in zip(starts, family.token_counts(np.array(grids)).tolist(), strict=True):
            found[start : start + count] = True
        return found


@dataclass(frozen=True, eq=False)
class CheckData:
    """The chosen samples: alone, and in packs."""

    alone: tuple[SampleBatch, ...]
    packs: tuple[SampleBatch, ...]


def chosen_samples(dataset: VlmDataset, tokens: int) -> list[int]:
    """Chooses up to four short samples: with a video, with an image, with several, and without.

    Args:
        dataset: The dataset.
        tokens: Room for all of them.

    Raises:
        UsageError: If not even two samples fit.
    """
    index = dataset.index
    counts = {kind: np.concatenate([[0], np.cumsum(index.item_kinds == kind)]) for kind in (IMAGE, VIDEO)}
    images, videos = (np.diff(each[index.grid_offsets]) for each in counts.values())
    padded = -(-index.lengths // _ALIGNMENT) * _ALIGNMENT
    usable = np.flatnonzero(index.num_targets > 0)
    order = usable[np.lexsort((usable, index.lengths[usable], index.lengths[usable] < _SHORT))].tolist()
    plain = videos == 0
    wishes = [(images == 1) & plain, (images > 1) & plain, (images == 0) & plain, images > 0]
    if videos.any():
        # Two samples with videos, one of them with an image, too, can get each other's.
        wishes = [(videos > 0) & (images == 0), (videos > 0) & (images > 0), (images > 0) & plain, videos > 0, *wishes]
    found: list[int] = []
    for wish in [*wishes, np.ones_like(plain)] * _MOST:
        room = tokens - int(padded[found].sum())
        fitting = (each for each in order if wish[each] and each not in found and padded[each] <= room)
        if len(found) < _MOST and (chosen := next(fitting, None)) is not None:
            found.append(chosen)
    if len(found) < 2:
        shortest = sorted(int(padded[each]) for each in order)[:2]
        lengths = " and ".join(str(each) for each in shortest) or "none"
        raise UsageError(
            f"{dataset.name}: a pack of {tokens} tokens has room for {len(found)} of the samples with targets; "
            f"a leak needs two. The shortest have {lengths} tokens: raise --tokens."
        )
    return found


def check_data(dataset: VlmDataset, tokens: int) -> CheckData:
    """Makes the batches that are compared.

    The second pack has the samples of the first in another order: as many tokens, but other boundaries.
    """
    numbers = chosen_samples(dataset, tokens)
    samples, count = [dataset[each] for each in numbers], len(numbers)
    seconds = [_seconds(dataset.metadata(each)) for each in numbers]
    orders = [tuple(range(count)), (*range(count - 2, -1, -1), count - 1)]
    if count == 2:
        orders[1] = (1, 0)
    alone = [_batch(dataset, samples, seconds, (number,), 1) for number in range(count)]
    return CheckData(tuple(alone), tuple(_batch(dataset, samples, seconds, order, _ALIGNMENT) for order in orders))


def _seconds(metadata: Mapping[str, Any]) -> tuple[float, ...]:
    """Seconds per temporal patch of the videos of a sample."""
    return tuple(each["seconds_per_patch"] for each in metadata.get("images", ()) if each.get("kind") == VIDEO)


def _batch(
    dataset: VlmDataset,
    samples: Sequence[Sample],
    seconds: Sequence[tuple[float, ...]],
    numbers: tuple[int, ...],
    alignment: int,
) -> SampleBatch:
    """Lays samples out one after another, as the loader does."""
    family, tokenizer = dataset.family, dataset.manifest.tokenizer
    chosen = [samples[number] for number in numbers]
    lengths = [each.length for each in chosen]
    starts = [0, *accumulate(-(-length // alignment) * alignment for length in lengths)]
    total = starts[-1]
    ids = torch.full((1, total), tokenizer.pad)
    labels = torch.full((1, total), IGNORE_INDEX)
    weights = torch.zeros(1, total)
    positions = torch.zeros(len(family.position_axes), 1, total, dtype=torch.long)
    padding = torch.ones(1, total, dtype=torch.bool)
    found = _Items()
    for sample, start in zip(chosen, starts, strict=False):
        end = start + sample.length
        own = torch.from_numpy(sample.input_ids[: sample.length].astype(np.int64))
        ids[0, start:end], padding[0, start:end] = own, False
        positions[:, 0, start:end] = torch.from_numpy(sample.position_ids[:, : sample.length].astype(np.int64))
        is_target = torch.from_numpy(sample.loss_mask[1 : sample.length].astype(np.bool_))
        labels[0, start : end - 1] = own[1:].where(is_target, IGNORE_INDEX)
        mask = sample.loss_mask if sample.loss_weights is None else sample.loss_weights
        weights[0, start : end - 1] = torch.from_numpy(mask[1 : sample.length].astype(np.float32))
        found.add(sample, start, family, tokenizer.placeholders)
    batch = PackedBatch(
        input_ids=ids,
        labels=labels,
        loss_mask=(labels != IGNORE_INDEX).float(),
        loss_weights=weights,
        position_ids=positions,
        padding_mask=padding,
        cu_seqlens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        cu_seqlens_padded=torch.tensor(starts, dtype=torch.int32),
        max_seqlen=max(b - a for a, b in pairwise(starts)),
        total_tokens=total,
        true_tokens=sum(lengths),
        **found.tensors(family),
        sample_keys=tuple(each.key for each in chosen),
        origins=tuple(SampleOrigin(0, 0, number, number) for number in numbers),
        epoch=0,
        step=0,
        micro_batch=0,
        pack=0,
        family=family,
    )
    told = tuple(each for number in numbers for each in seconds[number])
    longest = max((int(np.prod(item.grid)) for sample in samples for item in sample.items), default=0)
    return SampleBatch(batch, numbers, *_rows(batch, chosen, starts), told, longest)


class _Items:
    """The images and videos of a batch, apart, each in order."""

    def __init__(self) -> None:
        self._grids: dict[str, list[tuple[int, int, int]]] = {IMAGE: [], VIDEO: []}
        self._starts: dict[str, list[int]] = {IMAGE: [], VIDEO: []}
        self._patches: dict[str, list[npt.NDArray[np.uint8]]] = {IMAGE: [], VIDEO: []}
        self._blocks: list[int] = []

    def add(self, sample: Sample, start: int, family: Family, tokens: Mapping[str, tuple[int, ...]]) -> None:
        """Takes the items of a sample that begins at a token."""
        blocks = Blocks.of(family, [(item.kind, item.grid) for item in sample.items], tokens)
        starts = (start + blocks.locate(sample.input_ids[: sample.length])).tolist()
        begins, at = [*blocks.firsts.tolist(), len(starts)], 0
        for item, (first, last) in zip(sample.items, pairwise(begins), strict=True):
            self._grids[item.kind].append(item.grid)
            self._starts[item.kind].append(starts[first])
            self._blocks += starts[first:last] if item.kind == VIDEO else []
            rows = sample.patches[at : at + item.rows]
            copies = family.temporal_patch_size if item.kind == VIDEO else 1
            self._patches[item.kind].append(np.repeat(rows, copies // item.copies, axis=0))
            at += item.rows

    def tensors(self, family: Family) -> dict[str, Any]:
        """The fields of the batch."""
        none = np.zeros((0, family.patch_bytes), np.uint8)
        found: dict[str, Any] = {}
        for kind, patches in ((IMAGE, "patches"), (VIDEO, "video_patches")):
            if kind == VIDEO and not self._grids[kind]:
                continue
            grids = torch.tensor(self._grids[kind], dtype=torch.long).reshape(-1, 3)
            numbers = torch.arange(len(grids))
            if kind == IMAGE:
                found["image_indices"] = numbers
            else:
                found["video_runs"] = torch.stack([numbers, torch.zeros_like(numbers), grids[:, 0]], dim=1)
            found[f"{kind}_grid_thw"] = grids
            found[f"{kind}_starts"] = torch.tensor(self._starts[kind], dtype=torch.long)
            found[patches] = torch.from_numpy(np.concatenate([none, *self._patches[kind]]))
        if self._blocks:
            found["video_block_starts"] = torch.tensor(self._blocks, dtype=torch.long)
        return found


def _rows(
    batch: PackedBatch, samples: Sequence[Sample], starts: list[int]
) -> tuple[tuple[SampleSpans, ...], dict[str, int]]:
    assert batch.labels is not None
    units = [unit for each in UNITS_OF.values() for unit in each]
    totals = dict.fromkeys(("token", *units, "target"), 0)
    found = []
    for sample, start, stop in zip(samples, starts, starts[1:], strict=False):
        counts = {"target": int((batch.labels[0, start:stop] != IGNORE_INDEX).sum())}
        for kind, (patch, merged, item) in UNITS_OF.items():
            grids = [each.grid for each in sample.items if each.kind == kind]
            counts[patch] = sum(int(np.prod(grid)) for grid in grids)
            blocks = [block for grid in grids for block in batch.family.expansion(kind).blocks(grid)]
            counts[merged] = sum(int(are_placeholders(batch.family, kind, block).sum()) for block in blocks)
            counts[item] = len(grids)
        spans = {"token": (start, start + sample.length)}
        spans |= {name: (totals[name], totals[name] + count) for name, count in counts.items()}
        found.append(SampleSpans(sample.key, spans))
        totals |= {name: totals[name] + count for name, count in counts.items()}
    return tuple(found), totals | {"token": batch.total_tokens}
