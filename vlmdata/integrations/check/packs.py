"""Chooses a few samples of a dataset, and lays them out as batches: each alone, and all in packs of two orders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch

from vlmdata.batch import IGNORE_INDEX, PackedBatch, SampleOrigin
from vlmdata.errors import UsageError
from vlmdata.families.chat import IMAGE
from vlmdata.format.dataset import VlmDataset
from vlmdata.format.schema import Sample

#: Samples of a pack.
_MOST = 4
#: Samples shorter than this show little.
_SHORT = 8
#: Samples are padded to multiples of this in packs, as a parallel layout does.
_ALIGNMENT = 4


@dataclass(frozen=True)
class SampleSpans:
    """The rows of one sample in the tensors of a pack, for each thing that a tensor may have one row of.

    Attributes:
        key: Key of the sample.
        spans: [begin, end) by what is counted: ``token``, ``patch``, ``merged`` (image tokens), ``image``, ``target``.
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
    """

    batch: PackedBatch
    samples: tuple[int, ...]
    rows: tuple[SampleSpans, ...]
    totals: dict[str, int]

    @property
    def image_tokens(self) -> torch.Tensor:
        """Returns bool (T,), the placeholders of images."""
        found = torch.zeros(self.batch.total_tokens, dtype=torch.bool)
        factor = self.batch.family.patches_per_token
        for start, grid in zip(self.batch.host.image_starts, self.batch.host.image_grid_thw, strict=True):
            found[int(start) : int(start) + int(grid.prod()) // factor] = True
        return found


@dataclass(frozen=True, eq=False)
class CheckData:
    """The chosen samples: alone, and in packs."""

    alone: tuple[SampleBatch, ...]
    packs: tuple[SampleBatch, ...]


def chosen_samples(dataset: VlmDataset, tokens: int) -> list[int]:
    """Chooses up to four short samples: with an image, with several, and without.

    Args:
        dataset: The dataset.
        tokens: Room for all of them.

    Raises:
        UsageError: If not even two samples fit.
    """
    index = dataset.index
    images = np.diff(index.grid_offsets)
    padded = -(-index.lengths // _ALIGNMENT) * _ALIGNMENT
    others = np.concatenate([[0], np.cumsum(index.item_kinds != IMAGE)])
    plain = np.diff(others[index.grid_offsets]) == 0
    usable = np.flatnonzero((index.num_targets > 0) & plain)
    order = usable[np.lexsort((usable, index.lengths[usable], index.lengths[usable] < _SHORT))].tolist()
    wishes = [images == 1, images > 1, images == 0, images > 0]
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
            f"{dataset.name}: a pack of {tokens} tokens has room for {len(found)} of the samples with targets and "
            f"without videos; a leak needs two. The shortest have {lengths} tokens: raise --tokens."
        )
    return found


def check_data(dataset: VlmDataset, tokens: int) -> CheckData:
    """Makes the batches that are compared.

    The second pack has the samples of the first in another order: as many tokens, but other boundaries.
    """
    samples = [dataset[each] for each in chosen_samples(dataset, tokens)]
    count = len(samples)
    orders = [tuple(range(count)), (*range(count - 2, -1, -1), count - 1)]
    if count == 2:
        orders[1] = (1, 0)
    alone = [_batch(dataset, samples, (number,), 1) for number in range(count)]
    return CheckData(tuple(alone), tuple(_batch(dataset, samples, order, _ALIGNMENT) for order in orders))


def _batch(dataset: VlmDataset, samples: Sequence[Sample], numbers: tuple[int, ...], alignment: int) -> SampleBatch:
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
    image_starts: list[int] = []
    for sample, start in zip(chosen, starts, strict=False):
        end = start + sample.length
        own = torch.from_numpy(sample.input_ids[: sample.length].astype(np.int64))
        ids[0, start:end], padding[0, start:end] = own, False
        positions[:, 0, start:end] = torch.from_numpy(sample.position_ids[:, : sample.length].astype(np.int64))
        is_target = torch.from_numpy(sample.loss_mask[1 : sample.length].astype(np.bool_))
        labels[0, start : end - 1] = own[1:].where(is_target, IGNORE_INDEX)
        mask = sample.loss_mask if sample.loss_weights is None else sample.loss_weights
        weights[0, start : end - 1] = torch.from_numpy(mask[1 : sample.length].astype(np.float32))
        image_starts += [start + each for each in _image_starts(sample, tokenizer.image, family.patches_per_token)]
    grids = torch.from_numpy(np.concatenate([each.image_grid_thw for each in chosen]).astype(np.int64))
    patches = torch.from_numpy(np.concatenate([each.patches for each in chosen]))
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
        image_grid_thw=grids,
        image_starts=torch.tensor(image_starts, dtype=torch.long),
        image_indices=torch.arange(len(grids)),
        patches=patches,
        sample_keys=tuple(each.key for each in chosen),
        origins=tuple(SampleOrigin(0, 0, number, number) for number in numbers),
        epoch=0,
        step=0,
        micro_batch=0,
        pack=0,
        family=family,
    )
    return SampleBatch(batch, numbers, *_rows(batch, chosen, starts))


def _image_starts(sample: Sample, image: int, patches_per_token: int) -> list[int]:
    """First token of each image of a sample. Blocks of placeholders may touch, so their sizes count."""
    places = np.flatnonzero(sample.input_ids[: sample.length] == image)
    sizes = sample.image_grid_thw.prod(axis=1) // patches_per_token
    return [int(places[first]) for first in (np.cumsum(sizes) - sizes).tolist()]


def _rows(
    batch: PackedBatch, samples: Sequence[Sample], starts: list[int]
) -> tuple[tuple[SampleSpans, ...], dict[str, int]]:
    assert batch.labels is not None
    totals = dict.fromkeys(("token", "patch", "merged", "image", "target"), 0)
    found = []
    for sample, start, stop in zip(samples, starts, starts[1:], strict=False):
        patches = int(sample.image_grid_thw.prod(axis=1).sum())
        counts = {
            "patch": patches,
            "merged": patches // batch.family.patches_per_token,
            "image": len(sample.image_grid_thw),
            "target": int((batch.labels[0, start:stop] != IGNORE_INDEX).sum()),
        }
        spans = {"token": (start, start + sample.length)}
        spans |= {name: (totals[name], totals[name] + count) for name, count in counts.items()}
        found.append(SampleSpans(sample.key, spans))
        totals |= {name: totals[name] + count for name, count in counts.items()}
    return tuple(found), totals | {"token": batch.total_tokens}
