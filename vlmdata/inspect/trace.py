"""Traces an optimizer step to its source rows, and a source row to its samples and steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vlmdata.errors import DatasetFormatError, NotFoundError
from vlmdata.format.dataset import VlmDataset
from vlmdata.format.index import DatasetIndex
from vlmdata.format.ledger import read_ledger
from vlmdata.format.schema import LEDGER_NAME, parse_key
from vlmdata.format.selection import Selection
from vlmdata.packing.plan.epoch import EMPTY_PACK
from vlmdata.wording import counted

if TYPE_CHECKING:
    from vlmdata.loader.loader import StreamingLoader


@dataclass(frozen=True)
class FoundSample:
    """A sample in search results, from the index. Units: tokens, patches."""

    key: str
    index: int
    source_row: int
    length: int
    targets: int
    images: int
    patches: int
    truncated: bool


@dataclass(frozen=True)
class StepSample(FoundSample):
    """A sample of a step."""

    dataset: int  # number of its dataset
    aligned_length: int  # tokens in the pack, including padding
    repeat: int  # earlier uses in the whole training


@dataclass(frozen=True)
class StepPack:
    """A pack of a step, run by one data-parallel rank in one micro-batch. Units: tokens, patches."""

    dp_rank: int
    micro_batch: int
    pack: int  # number within the epoch; -1 for an empty pack
    tokens: int  # padding included
    patches: int
    cost: int  # in units of 2**20 FLOP
    samples: tuple[StepSample, ...]  # in pack order


@dataclass(frozen=True)
class StepDescription:
    """An optimizer step."""

    epoch: int
    step: int  # within the epoch
    steps: int  # number of steps in the epoch
    dp_size: int
    datasets: tuple[str, ...]  # folders or URLs, by number
    packs: tuple[StepPack, ...]  # by rank and micro-batch


@dataclass(frozen=True)
class RowUse:
    """A use of a sample by a loader."""

    epoch: int
    step: int | None  # None if it is in a dropped last step
    dp_rank: int | None
    micro_batch: int | None
    pack: int  # number within the epoch


@dataclass(frozen=True)
class CandidateTrace:
    """The outcome of one candidate of a source row. A row without a list has one candidate."""

    sample: int | None  # number within the row's list; None without a list
    status: str  # "sample" or "rejected"
    key: str | None = None
    index: int | None = None  # position of its sample
    shard: str | None = None  # file name
    offset: int | None = None  # in the shard, in bytes
    size: int | None = None  # in bytes
    reason: str | None = None  # for the rejection
    message: str | None = None  # of the rejection
    place: str | None = None  # of a rejected row in its source, in words
    uses: tuple[RowUse, ...] = ()  # by the loader, if a loader was given


@dataclass(frozen=True)
class RowTrace:
    """The outcome of a source row: of each of its candidates, in the order of its list; at least one."""

    source_row: int
    rows: int  # of the source
    candidates: tuple[CandidateTrace, ...]


def describe_step(loader: StreamingLoader, epoch: int, step: int, dp_rank: int | None = None) -> StepDescription:
    """Describes the packs of an optimizer step by rank and micro-batch. Reads only plan and indexes.

    Args:
        loader: The loader; its own ``dp_rank`` has no effect.
        epoch: The epoch.
        step: The step within it.
        dp_rank: One data-parallel rank; None means all.

    Raises:
        NotFoundError: If the step or the rank does not exist.
    """
    if epoch < 0:
        raise NotFoundError(f"epoch {epoch}: epochs count from 0")
    plan = loader.plan(epoch)
    if not 0 <= step < plan.num_steps:
        raise NotFoundError(f"no step {step}: epoch {epoch} has {counted(plan.num_steps, 'step')}, numbered from 0")
    if dp_rank is not None and not 0 <= dp_rank < loader.dp_size:
        raise NotFoundError(
            f"no data-parallel rank {dp_rank}: the layout has {counted(loader.dp_size, 'rank')}, numbered from 0"
        )
    assignment = plan.assignment(step, loader.dp_size)
    packs = []
    for rank in range(loader.dp_size) if dp_rank is None else [dp_rank]:
        for micro_batch, number in enumerate(assignment[:, rank].tolist()):
            packs.append(_pack(loader, epoch, rank, micro_batch, number))
    names = tuple(dataset.name for dataset in loader.datasets)
    return StepDescription(epoch, step, plan.num_steps, loader.dp_size, names, tuple(packs))


def step_of_run(loader: StreamingLoader, number: int) -> tuple[int, int]:
    """Returns the epoch, and the step in it, of a step of a training run, counted from 1 over all epochs.

    All epochs before the step are planned, because each has its own number of steps.

    Raises:
        NotFoundError: If the number is below 1.
    """
    if number < 1:
        raise NotFoundError(f"no step {number}: a run's steps count from 1")
    epoch, step = 0, number - 1
    while step >= (steps := loader.steps(epoch)):
        epoch, step = epoch + 1, step - steps
    return epoch, step


def describe_row(
    dataset: VlmDataset, source_row: int, loader: StreamingLoader | None = None, epoch: int = 0
) -> RowTrace:
    """Describes the outcome of a source row: its samples, and the reasons for rejections.

    Args:
        dataset: The dataset.
        source_row: The row.
        loader: A loader of this dataset only, to report where it uses the sample.
        epoch: The epoch of these uses.

    Raises:
        NotFoundError: If the source has no such row, or the dataset does not contain it.
        DatasetFormatError: If the row is neither in the index nor in the ledger.
    """
    selection = Selection.read(dataset.manifest.source)
    rows = dataset.manifest.totals.rows if selection is None else selection.of_rows
    if not 0 <= source_row < rows:
        raise NotFoundError(f"no source row {source_row}: the source has {counted(rows, 'row')}, numbered from 0")
    index = dataset.index
    first, stop = (int(np.searchsorted(index.source_row, source_row, side)) for side in ("left", "right"))
    found = [_sample_trace(dataset, i, loader, epoch) for i in range(first, stop)]
    # A row without a list is either a sample or rejected. Only lists need a look at the ledger too.
    if not found or found[0].sample is not None:
        found += [
            CandidateTrace(
                rejection.sample,
                "rejected",
                reason=rejection.reason.value,
                message=rejection.message,
                place=rejection.place or None,
            )
            for rejection in read_ledger(dataset.directory / LEDGER_NAME)
            if rejection.row == source_row
        ]
    if not found and selection is not None:
        raise NotFoundError(
            f"source row {source_row} is not in this dataset: it contains {dataset.manifest.totals.rows:,} of the "
            f"source's {rows:,} rows"
        )
    if not found:
        raise DatasetFormatError(
            f"{dataset.name}: source row {source_row} is neither a sample nor rejected. Run `vlmdata verify` on it."
        )
    return RowTrace(source_row, rows, tuple(sorted(found, key=lambda each: each.sample or 0)))


def _sample_trace(dataset: VlmDataset, i: int, loader: StreamingLoader | None, epoch: int) -> CandidateTrace:
    index, key = dataset.index, dataset.index.key(i)
    named = parse_key(key)
    shard = dataset.shard_path(int(index.shard[i])).name
    uses = () if loader is None else _uses(loader, epoch, i)
    sample = named[1] if named is not None and named[1] >= 0 else None
    return CandidateTrace(sample, "sample", key, i, shard, int(index.offset[i]), int(index.size[i]), uses=uses)


def found_samples(dataset: VlmDataset, positions: Iterable[int]) -> tuple[FoundSample, ...]:
    """Returns the samples at some positions, from the index."""
    return tuple(FoundSample(**_facts(dataset.index, i)) for i in positions)


def _facts(index: DatasetIndex, i: int) -> dict[str, Any]:
    return {
        "key": index.key(i),
        "index": i,
        "source_row": int(index.source_row[i]),
        "length": int(index.lengths[i]),
        "targets": int(index.num_targets[i]),
        "images": int(index.item_counts[i]),
        "patches": int(index.num_patches[i]),
        "truncated": bool(index.truncated[i]),
    }


def _pack(loader: StreamingLoader, epoch: int, rank: int, micro_batch: int, number: int) -> StepPack:
    plan = loader.plan(epoch)
    config = plan.config
    if number == EMPTY_PACK:
        tokens = config.capacity if config.pad_to_capacity else config.alignment
        return StepPack(rank, micro_batch, EMPTY_PACK, tokens, 0, 0, ())
    pack = plan.pack(number)
    columns = (pack.dataset, pack.index, pack.aligned_lengths, pack.repeats)
    samples = []
    for dataset, i, length, repeat in zip(*(column.tolist() for column in columns), strict=True):
        facts = _facts(loader.datasets[dataset].index, i)
        samples.append(StepSample(**facts, dataset=dataset, aligned_length=length, repeat=repeat))
    return StepPack(
        dp_rank=rank,
        micro_batch=micro_batch,
        pack=number,
        tokens=int(pack.aligned_lengths.sum()) + pack.tail,
        patches=sum(sample.patches for sample in samples),
        cost=int(plan.pack_costs(np.array([number]))[0]),
        samples=tuple(samples),
    )


def _uses(loader: StreamingLoader, epoch: int, i: int) -> tuple[RowUse, ...]:
    plan = loader.plan(epoch)
    packs = np.searchsorted(plan.offsets, np.flatnonzero(plan.samples == i), side="right") - 1
    uses = []
    for pack in packs.tolist():
        step = pack // plan.config.global_batch
        if step >= plan.num_steps:
            uses.append(RowUse(epoch, None, None, None, pack))
            continue
        micro_batch, rank = np.argwhere(plan.assignment(step, loader.dp_size) == pack)[0].tolist()
        uses.append(RowUse(epoch, step, rank, micro_batch, pack))
    return tuple(uses)
