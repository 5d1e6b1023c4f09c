"""Reports the quality of a plan: fill, waste, distance from the lower bound, and balance across ranks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from vlmdata.packing.alignment import aligned
from vlmdata.packing.arrays import FloatArray, IntArray
from vlmdata.packing.bins.two_limits import Limits, lower_bound, volume_bound
from vlmdata.packing.plan.balance import balanced, imbalance, in_order, micro_batch_imbalance
from vlmdata.packing.plan.blend import DatasetShare, realised_shares
from vlmdata.packing.plan.epoch import EpochPlan
from vlmdata.packing.seeding import derive_key, permutation

# Steps are evaluated in chunks of about this many packs, to bound memory.
_PACKS_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True)
class Balance:
    """Maximum over mean of cost, before (plan order) and after (balanced); mean and worst over the epoch's steps.

    Ranks meet at the end of a step, or in every micro-batch (expert parallelism).
    """

    rank_before: float  # mean over steps of most expensive rank / mean rank, summed over micro-batches
    rank_after: float
    rank_before_worst: float  # worst step
    rank_after_worst: float
    micro_batch_before: float  # the same as rank_before if ranks meet in every micro-batch
    micro_batch_after: float


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Quality of a plan. Counts cover the whole epoch, including a dropped last step.

    Attributes:
        epoch: The epoch.
        steps: Optimizer steps.
        packs: Packs with samples.
        empty_packs: Empty packs that complete the last step.
        dropped_packs: Packs of a dropped last step.
        samples: Number of sample uses.
        tokens: True tokens.
        fill: True tokens divided by the capacity of all packs (packs times capacity).
        alignment_waste: Share of that capacity that pads samples to the alignment.
        capacity_waste: Share of that capacity that no sample uses. ``fill + alignment_waste + capacity_waste`` is 1. It
            costs compute only with ``pad_to_capacity``; otherwise packs are simply shorter.
        volume_bound: Packs that the sums of tokens and patches need.
        lower_bound: Minimum number of packs of any packing without windows: the linear program's bound, which also
            accounts for lengths that do not divide the capacity. At least ``volume_bound``.
        excess: Packs divided by ``lower_bound``, minus 1.
        naive_padded_tokens: Tokens, including padding, if the same samples in random order were batched without
            packing, with the packs' numbers of samples per batch and each batch padded to its longest sample.
        naive_ratio: ``naive_padded_tokens`` divided by the tokens of the packs (their capacity with
            ``pad_to_capacity``, else aligned tokens).
        dp_size: Data-parallel size for ``balance``.
        balance: See :class:`Balance`.
        datasets: Contribution of each dataset.
    """

    epoch: int
    steps: int
    packs: int
    empty_packs: int
    dropped_packs: int
    samples: int
    tokens: int
    fill: float
    alignment_waste: float
    capacity_waste: float
    volume_bound: int
    lower_bound: int
    excess: float
    naive_padded_tokens: int
    naive_ratio: float
    dp_size: int
    balance: Balance
    datasets: tuple[DatasetShare, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON values."""
        return dataclasses.asdict(self)


def report_plan(plan: EpochPlan, dp_size: int = 1) -> PlanReport:
    """Evaluates a plan.

    Args:
        plan: The plan.
        dp_size: Data-parallel ranks; must divide the global batch.

    Raises:
        ValueError: If ``dp_size`` does not divide ``global_batch``.
    """
    config = plan.config
    lengths = plan.table.lengths[plan.samples].astype(np.int64)
    padded = aligned(lengths, config.alignment)
    room = plan.num_packs * config.capacity
    tokens, padded_tokens = int(lengths.sum()), int(padded.sum())
    patches = plan.table.num_patches[plan.samples].astype(np.int64)
    limits = Limits(config.capacity // config.alignment, config.max_patches)
    units = padded // config.alignment
    volume = volume_bound(units, patches, limits)
    # The linear program is solved only if there is something to find out.
    bound = volume if volume == plan.num_packs else lower_bound(units, patches, limits)
    naive = _naive_padded_tokens(padded, np.diff(plan.offsets), config.seed)
    last = plan.padded_step(plan.num_steps - 1, dp_size)
    return PlanReport(
        epoch=plan.epoch,
        steps=plan.num_steps,
        packs=plan.num_packs,
        empty_packs=int((last < 0).sum()),
        dropped_packs=max(0, plan.num_packs - plan.num_steps * config.global_batch),
        samples=len(plan.samples),
        tokens=tokens,
        fill=tokens / room,
        alignment_waste=(padded_tokens - tokens) / room,
        capacity_waste=(room - padded_tokens) / room,
        volume_bound=volume,
        lower_bound=bound,
        excess=plan.num_packs / bound - 1,
        naive_padded_tokens=naive,
        naive_ratio=naive / (room if config.pad_to_capacity else padded_tokens),
        dp_size=dp_size,
        balance=measure_balance(plan, dp_size),
        datasets=realised_shares(plan.table, plan.samples),
    )


def measure_balance(plan: EpochPlan, dp_size: int) -> Balance:
    """Compares the cost across ranks in plan order and balanced, over all steps.

    The costs are those of ``plan.config.cost``, regardless of ``balance``.

    Raises:
        ValueError: If ``dp_size`` does not divide ``global_batch``.
    """
    ratios: list[FloatArray] = []
    at_once = max(1, _PACKS_AT_ONCE // plan.config.global_batch)
    full_steps = plan.num_packs // plan.config.global_batch
    chunks = [range(start, min(start + at_once, full_steps)) for start in range(0, full_steps, at_once)]
    if plan.num_steps > full_steps:
        chunks.append(range(full_steps, plan.num_steps))
    for steps in chunks:
        packs = np.concatenate([plan.padded_step(number, dp_size) for number in steps])
        costs = plan.pack_costs(packs).reshape(len(steps), -1)
        plain, even = in_order(*costs.shape, dp_size), balanced(costs, dp_size)
        ways = [(measure, way) for measure in (imbalance, micro_batch_imbalance) for way in (plain, even)]
        ratios.append(np.stack([measure(costs, way) for measure, way in ways]))
    rank_before, rank_after, micro_before, micro_after = np.concatenate(ratios, axis=1)
    return Balance(
        rank_before=float(rank_before.mean()),
        rank_after=float(rank_after.mean()),
        rank_before_worst=float(rank_before.max()),
        rank_after_worst=float(rank_after.max()),
        micro_batch_before=float(micro_before.mean()),
        micro_batch_after=float(micro_after.mean()),
    )


def _naive_padded_tokens(padded: IntArray, counts: IntArray, seed: int) -> int:
    """Returns the tokens if batches with these sample counts, in random order, were padded to their longest sample."""
    shuffled = padded[permutation(len(padded), derive_key("naive", seed))]
    longest = np.maximum.reduceat(shuffled, np.cumsum(counts) - counts)
    return int((longest * counts).sum())
