"""The plan of an epoch: which samples share a pack, which packs form a step, and which rank runs which pack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from vlmdata.errors import UsageError
from vlmdata.packing.alignment import aligned
from vlmdata.packing.arrays import IntArray, offsets_of, ranges
from vlmdata.packing.bins.two_limits import Limits, Window, pack_windows
from vlmdata.packing.config import PlanConfig, first_epoch
from vlmdata.packing.plan.balance import balanced, in_order
from vlmdata.packing.plan.blend import epoch_passes, usable_samples, uses_per_epoch
from vlmdata.packing.plan.history import Uses, datasets_of, stage_of, used_before
from vlmdata.packing.plan.repeats import pack_apart
from vlmdata.packing.plan.windows import Windows, make_windows
from vlmdata.packing.seeding import derive_key, permutation
from vlmdata.packing.table import SampleTable
from vlmdata.wording import counted

EMPTY_PACK = -1
_SHOWN = 10


@dataclass(frozen=True, eq=False, slots=True)
class Pack:
    """The samples of one pack, in storage order."""

    samples: IntArray  # int64 (k,), table positions, increasing
    repeats: npt.NDArray[np.int32]  # int32 (k,), earlier uses of each sample in the training
    dataset: npt.NDArray[np.int32]  # int32 (k,), dataset number
    index: IntArray  # int64 (k,), position within the dataset
    aligned_lengths: IntArray  # int64 (k,), tokens of each sample, including padding
    tail: int  # padding tokens after the samples, a separate segment; 0 unless pad_to_capacity


@dataclass(frozen=True, eq=False, slots=True)
class EpochPlan:
    """An epoch's packs in order, built by :func:`plan_epoch`.

    Step k is packs ``[k * global_batch, (k + 1) * global_batch)``, for any number of ranks. A resumed run builds the
    plan again from (table, config, epoch) and goes directly to its step.

    Attributes:
        table: The samples.
        config: The settings.
        epoch: The epoch.
        samples: int32 (m,), table positions, pack by pack.
        repeats: int32 (m,), see :class:`Pack`.
        offsets: int64 (packs + 1,); pack i holds ``samples[offsets[i]:offsets[i + 1]]``.
        window_offsets: int64 (W + 1,); window w's packs are ``[window_offsets[w], window_offsets[w + 1])``.
    """

    table: SampleTable
    config: PlanConfig
    epoch: int
    samples: npt.NDArray[np.int32]
    repeats: npt.NDArray[np.int32]
    offsets: IntArray
    window_offsets: IntArray

    @property
    def num_packs(self) -> int:
        """Number of packs in the epoch, including those of a dropped last step, without empty packs."""
        return len(self.offsets) - 1

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps in the epoch. Differs slightly between epochs."""
        if self.config.last == "drop":
            return max(1, self.num_packs // self.config.global_batch)  # the only step is padded
        return -(-self.num_packs // self.config.global_batch)

    def pack(self, number: int) -> Pack:
        """Returns the samples of a pack.

        Raises:
            IndexError: If the number is not in ``[0, num_packs)``.
        """
        if not 0 <= number < self.num_packs:
            raise IndexError(f"pack {number} of {self.num_packs}")
        start, stop = int(self.offsets[number]), int(self.offsets[number + 1])
        # Storage order: a reader visits each shard once and moves forward in it.
        order = np.lexsort((self.repeats[start:stop], self.samples[start:stop]))
        samples = self.samples[start:stop][order].astype(np.int64)
        dataset = self.table.dataset[samples]
        lengths = aligned(self.table.lengths[samples], self.config.alignment)
        tail = self.config.capacity - int(lengths.sum()) if self.config.pad_to_capacity else 0
        index = samples - self.table.dataset_offsets()[dataset]
        return Pack(samples, self.repeats[start:stop][order], dataset, index, lengths, tail)

    def step(self, number: int) -> IntArray:
        """Returns the packs of an optimizer step over all ranks, independent of the number of ranks.

        Returns:
            int64 (k,), pack numbers: ``global_batch`` of them, fewer only in an incomplete last step.

        Raises:
            IndexError: If the number is not in ``[0, num_steps)``.
        """
        if not 0 <= number < self.num_steps:
            raise IndexError(f"step {number} of {self.num_steps}")
        start = number * self.config.global_batch
        return np.arange(start, min(start + self.config.global_batch, self.num_packs))

    def assignment(self, number: int, dp_size: int) -> IntArray:
        """Returns the pack that each data-parallel rank runs in each micro-batch of a step.

        Returns:
            int64 (micro-batches, dp_size): pack numbers, -1 for an empty pack. Contains every pack of the step
                once.

        Raises:
            IndexError: If there is no such step.
            UsageError: If ``global_batch`` is not a multiple of ``dp_size``.
        """
        packs = self.padded_step(number, dp_size)
        if self.config.balance and len(packs) > 1:
            costs = self.pack_costs(packs)
            positions = balanced(costs[None], dp_size)[0]
        else:
            positions = in_order(1, len(packs), dp_size)[0]
        assigned: IntArray = packs[positions]
        return assigned

    def padded_step(self, number: int, dp_size: int) -> IntArray:
        """Returns the packs of a step, completed with empty packs according to ``config.last``.

        Returns:
            int64 (micro-batches * dp_size,): pack numbers, then -1.

        Raises:
            IndexError: If there is no such step.
            UsageError: If ``global_batch`` is not a multiple of ``dp_size``.
        """
        global_batch = self.config.global_batch
        if dp_size < 1 or global_batch % dp_size:
            raise UsageError(f"global_batch {global_batch} is not a multiple of dp_size {dp_size}")
        packs = self.step(number)
        size = -(-len(packs) // dp_size) * dp_size if self.config.last == "keep" else global_batch
        return np.concatenate([packs, np.full(size - len(packs), EMPTY_PACK)])

    def micro_batches(self, dp_size: int) -> int:
        """Returns the number of packs per data-parallel rank in the epoch, including empty ones.

        Raises:
            UsageError: If ``global_batch`` is not a multiple of ``dp_size``.
        """
        if self.num_steps == 0:
            return 0
        last = len(self.padded_step(self.num_steps - 1, dp_size)) // dp_size
        return (self.num_steps - 1) * (self.config.global_batch // dp_size) + last

    def pack_costs(self, packs: IntArray) -> IntArray:
        """Returns the estimated cost of packs, int64 (k,), under ``config.cost``.

        Returns:
            int64 (k,), in units of 2**20 FLOP; 0 for an empty pack (-1).
        """
        real = packs >= 0
        starts = self.offsets[packs[real]]
        counts = self.offsets[packs[real] + 1] - starts
        firsts = offsets_of(counts)[:-1]
        samples = self.samples[ranges(starts, counts)]
        lengths = aligned(self.table.lengths[samples], self.config.alignment)
        costs = self.config.cost.sample_costs(
            lengths,
            self.table.num_targets[samples],
            self.table.num_patches[samples],
            self.table.sum_patches_squared[samples],
        )
        result = np.zeros(len(packs), np.int64)
        if len(firsts):
            totals = np.add.reduceat(costs, firsts)
            if self.config.pad_to_capacity:
                tails = self.config.capacity - np.add.reduceat(lengths, firsts)
                nothing = np.zeros(len(tails), np.int64)
                totals += self.config.cost.sample_costs(tails, nothing, nothing, nothing)
            result[real] = totals
        return result


def plan_epoch(
    table: SampleTable,
    config: PlanConfig,
    epoch: int,
    key_of: Callable[[int], str] | None = None,
    used: Uses | None = None,
) -> EpochPlan:
    """Plans an epoch. A pure function of its arguments, with equal results on every machine.

    An epoch before ``config.first_epoch`` is planned with the earlier settings. The epoch in which they changed ends
    there.

    Args:
        table: The samples.
        config: The settings, without a schedule (:class:`vlmdata.packing.plan.run.RunPlans` has one).
        epoch: From 0.
        key_of: Returns a sample's key by table position, for error messages.
        used: The result of :func:`uses_before`, to save its time; None computes it.

    Returns:
        The plan.

    Raises:
        UsageError: If a sample fits no pack, if there are no samples, or if the blend does not match the datasets.
    """
    if epoch < 0:
        raise UsageError(f"epoch is {epoch}; epochs count from 0")
    if config.schedule:
        raise UsageError("a plan of one epoch has no schedule: RunPlans settles it")
    earlier = config.earlier
    number = stage_of(earlier, epoch)
    if number == len(earlier):
        used = uses_before(table, config) if used is None else used
        return _plan_stage(table, config, epoch, config.first_epoch, used, key_of)
    stage = earlier[number]
    part, positions = datasets_of(table, stage.datasets)
    before = used_before(table, earlier[:number], _samples_until)
    first = first_epoch(earlier[:number])
    plan = _plan_stage(part, stage.config, epoch, first, None if before is None else before[positions])
    if epoch == stage.epoch:
        plan = until_step(plan, stage.step)
    return replace(plan, table=table, samples=positions[plan.samples].astype(np.int32))


def uses_before(table: SampleTable, config: PlanConfig, known: tuple[int, Uses | None] = (0, None)) -> Uses | None:
    """Returns the uses of each sample before ``config.first_epoch``, int32 (n,); None if that is 0.

    ``known`` are the uses in the first earlier stages, and the number of these.
    """
    return used_before(table, config.earlier, _samples_until, known)


def until_step(plan: EpochPlan, step: int) -> EpochPlan:
    """Returns the first steps of a plan, at least one.

    Raises:
        UsageError: If the plan does not have so many whole steps: it is that of other data or settings.
    """
    packs = step * plan.config.global_batch
    if packs > plan.num_packs:
        raise UsageError(f"the run changed at step {step} of epoch {plan.epoch}, which has {plan.num_steps} steps")
    offsets = plan.offsets[: packs + 1]
    return replace(
        plan,
        samples=plan.samples[: offsets[-1]],
        repeats=plan.repeats[: offsets[-1]],
        offsets=offsets,
        window_offsets=np.unique(np.minimum(plan.window_offsets, packs)),
    )


def _samples_until(
    table: SampleTable, config: PlanConfig, epoch: int, first: int, used: Uses | None, step: int
) -> npt.NDArray[np.int32]:
    return until_step(_plan_stage(table, config, epoch, first, used), step).samples


def _plan_stage(
    table: SampleTable,
    config: PlanConfig,
    epoch: int,
    first: int,
    used: Uses | None,
    key_of: Callable[[int], str] | None = None,
) -> EpochPlan:
    """Plans an epoch with these settings, which the run has from epoch ``first`` on, after these uses of samples."""
    check_limits(table, config, key_of)
    passes = epoch_passes(table, config.blend, config.seed, epoch - first, used)
    windows = make_windows(table, passes, config.shuffle_window, config.seed, epoch)
    repeated = len({each.dataset for each in passes}) < len(passes)
    return _pack_windows(table, config, epoch, windows, repeated)


def check_limits(table: SampleTable, config: PlanConfig, key_of: Callable[[int], str] | None = None) -> None:
    """Raises an error if the blend has no samples, or for those that fit no pack, with their number and the first ten.

    ``key_of`` returns a sample's key by table position; without it, positions are shown.

    Raises:
        UsageError: If there are such samples.
    """
    # Datasets that give less than a sample to an epoch give none to the first one.
    if max(uses_per_epoch(table, config.blend), default=0) < 1:
        raise UsageError(f"an epoch has no samples: {counted(len(table), 'sample')} in total, blend {config.blend}")
    lengths = aligned(table.lengths, config.alignment)
    usable = config.capacity // config.alignment * config.alignment
    wanted = _wanted(table, config)
    _refuse(
        np.flatnonzero(wanted & (lengths > usable)),
        f"longer than capacity {config.capacity} at alignment {config.alignment} ({counted(usable, 'usable token')})",
        lambda i: f"{counted(int(table.lengths[i]), 'token')}, {lengths[i]:,} aligned",
        f"raise capacity to at least {int(lengths[wanted].max(initial=0))}",
        key_of,
    )
    if config.max_patches is not None:
        _refuse(
            np.flatnonzero(wanted & (table.num_patches > config.max_patches)),
            f"with more than {counted(config.max_patches, 'vision patch')} (max_patches)",
            lambda i: counted(int(table.num_patches[i]), "patch"),
            f"raise max_patches to at least {int(table.num_patches[wanted].max(initial=0))}",
            key_of,
        )


def _wanted(table: SampleTable, config: PlanConfig) -> npt.NDArray[np.bool_]:
    """Returns the samples that some epoch uses, bool (n,): those that the blend allows, of datasets with a weight."""
    if config.blend is None:
        return np.ones(len(table), np.bool_)
    found = np.zeros(len(table), np.bool_)
    for weight, samples in zip(config.blend.weights, usable_samples(table, config.blend), strict=True):
        found[samples] = weight > 0
    return found


def _refuse(
    positions: IntArray, what: str, describe: Callable[[int], str], remedy: str, key_of: Callable[[int], str] | None
) -> None:
    if not len(positions):
        return
    name = key_of if key_of is not None else (lambda i: f"sample {i}")
    shown = "; ".join(f"{name(i)} ({describe(i)})" for i in positions[:_SHOWN].tolist())
    more = f"; and {len(positions) - _SHOWN} more" if len(positions) > _SHOWN else ""
    raise UsageError(
        f"{counted(len(positions), 'sample')} {what}: {shown}{more}. Either {remedy}, or exclude them in "
        "preprocessing (smaller max_pixels or max_length)"
    )


def _pack_windows(table: SampleTable, config: PlanConfig, epoch: int, windows: Windows, repeated: bool) -> EpochPlan:
    """Packs each window separately and shuffles its packs; ``repeated`` if it may hold a sample more than once."""
    units = config.capacity // config.alignment
    tokens = aligned(table.lengths, config.alignment) // config.alignment
    patches = tokens if config.max_patches is None else table.num_patches.astype(np.int64)
    bounds = list(pairwise(windows.offsets.tolist()))
    parts = []
    for number, (start, stop) in enumerate(bounds):
        uses = windows.samples[start:stop]
        parts.append(Window(tokens[uses], patches[uses], derive_key("window", config.seed, epoch, number)))
    limits, key = Limits(units, config.max_patches), derive_key("epoch", config.seed, epoch)
    if repeated:
        packed = pack_apart(parts, [windows.samples[start:stop] for start, stop in bounds], limits, key)
    else:  # nothing to look for, which would take a third of the plan's time
        packed = pack_windows(parts, limits, key)
    samples = np.empty(len(windows.samples), np.int32)
    repeats = np.empty(len(windows.samples), np.int32)
    counts = []
    for (start, stop), part, bins in zip(bounds, parts, packed, strict=True):
        shuffled = bins.reordered(permutation(bins.num_bins, derive_key("packs", part.key)))
        samples[start:stop] = windows.samples[start:stop][shuffled.items]
        repeats[start:stop] = windows.repeats[start:stop][shuffled.items]
        counts.append(np.diff(shuffled.offsets))
    window_offsets = np.cumsum([0] + [len(count) for count in counts])
    return EpochPlan(table, config, epoch, samples, repeats, offsets_of(np.concatenate(counts)), window_offsets)
