"""Exchanges items between pairs of bins, until few bins are over one of two limits.

Each bin over a limit is paired with another bin of its group. The two make the exchange that leaves them least over the
limits, both together. Then they get other partners. Partners are drawn at random, and all pairs are processed at once.
At first, each bin of a pair gives at most one item. When few pairs gain from that, each gives up to two.

The excess of a pair after an exchange takes few operations. If a and b are what the two bins use above the limit
(negative if below), and the first gives d to the second, then

    2 (max(a - d, 0) + max(b + d, 0)) = a + b + max(|a - b - 2 d|, |a + b|).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vlmdata.packing.arrays import IntArray, sums_by
from vlmdata.packing.seeding import derive_key, grouped_permutation

# Items of a bin that may be exchanged during a phase, and free slots for additional items.
_MOVABLE = 6
_FREE = 1
# For each bin over a limit: how many bins within the limits take part in a phase, and how many it chooses from in a
# round.
_PARTNERS = 8
_CHOICE = 4
_ROUNDS = 8
# If a smaller share of pairs gains from exchanging single items, up to two are exchanged.
_GAINING = 0.1
# A phase that leaves more than this share of the excess is the last one.
_WORTHWHILE = 0.9
# Exchanges to evaluate in all, per item, and the minimum. A hundred thousand take about a millisecond.
_WORK_PER_ITEM = 100
_LEAST_WORK = 2 * 10**7
# Exchanges to evaluate in one numpy operation, so that their numbers stay in cache.
_IN_STEP = 1 << 16

_Numbers = npt.NDArray[np.integer]  # shares of a limit, times both limits: int32 if these fit, otherwise int64


@dataclass(slots=True)
class _Phase:
    """The bins that take part in the rounds of one phase."""

    group: IntArray  # int64 (b,)
    slots: IntArray  # int64 (b, slots), items that may be exchanged, -1 for none
    over: IntArray  # int64 (2, b), use of each limit, minus the limit


def exchange(
    labels: IntArray, group: IntArray, uses: tuple[IntArray, IntArray], limits: tuple[int, int], key: int
) -> IntArray:
    """Exchanges items between bins of a group until no bin is over a limit, or more exchanges are not worthwhile.

    Args:
        labels: Bin of each item, int64 (n,). Bins may be empty.
        group: Group of each bin, int64 (B,), from 0. A group with more items than room is left alone.
        uses: What each item uses of each limit, two arrays int64 (n,).
        limits: The limits.
        key: Stream key for drawing pairs.

    Returns:
        The new bin of each item, int64 (n,). Some bins may still be over a limit. A pure function of the arguments.
    """
    unit = max(1, int(np.gcd.reduce(uses[1])))  # patches come in fours; smaller numbers are faster
    second = limits[1] // unit
    limit = limits[0] * second
    needs: _Numbers = np.zeros((2, len(labels) + 1), np.int64)  # the last one is no item
    needs[0, :-1], needs[1, :-1] = uses[0] * second, uses[1] // unit * limits[0]
    over = np.stack([sums_by(labels, need, len(group)) for need in needs[:, :-1]]) - limit
    fits = np.stack([sums_by(group, use, int(group.max()) + 1) for use in over]).max(axis=0) <= 0
    # The largest number in a round is below 16 times this.
    if 16 * max(limit, 2 * int(over.max())) < 1 << 31:
        needs = needs.astype(np.int32)
    labels = labels.copy()
    left = max(_WORK_PER_ITEM * len(labels), _LEAST_WORK)
    number, many = 0, 1
    excess = int(np.maximum(over, 0)[:, fits[group]].sum())
    while excess and left > 0:
        before_phase = left
        bins = _taking_part((over > 0).any(axis=0) & fits[group], group, derive_key("phase", key, number))
        phase = _Phase(group[bins], _slots(labels, bins, len(group), derive_key("slots", key, number)), over[:, bins])
        for turn in range(_ROUNDS):
            work, gaining = _round(phase, needs, many, derive_key("round", key, number, turn))
            left -= work
            if gaining < _GAINING:
                many = 2
        over[:, bins] = phase.over
        taken = phase.slots >= 0
        labels[phase.slots[taken]] = np.broadcast_to(bins[:, None], taken.shape)[taken]
        number += 1
        before, excess = excess, int(np.maximum(over, 0)[:, fits[group]].sum())
        if left == before_phase or (excess > before * _WORTHWHILE and number > 1):
            break
    return labels


def _taking_part(bad: npt.NDArray[np.bool_], group: IntArray, key: int) -> IntArray:
    """Returns the bad bins, and several times as many others, drawn from each group."""
    num_groups = int(group.max()) + 1
    order = grouped_permutation(group, num_groups, key)
    order = order[~bad[order]]
    wanted = np.bincount(group[bad], minlength=num_groups) * _PARTNERS
    return np.concatenate([np.flatnonzero(bad), order[_within(group[order]) < wanted[group[order]]]])


def _slots(labels: IntArray, bins: IntArray, num_bins: int, key: int) -> IntArray:
    """Draws the items of some bins that may be exchanged, int64 (len(bins), slots), -1 for a free slot."""
    place = np.full(num_bins, -1)
    place[bins] = np.arange(len(bins))
    items = np.flatnonzero(place[labels] >= 0)
    items = items[grouped_permutation(place[labels[items]], len(bins), key)]
    within = _within(place[labels[items]])
    slots = np.full((len(bins), min(_MOVABLE, int(within.max()) + 1) + _FREE), -1)
    drawn = within < _MOVABLE
    slots[place[labels[items[drawn]]], within[drawn]] = items[drawn]
    return slots


def _within(groups: IntArray) -> IntArray:
    """Numbers the members of each group from 0; groups are sorted, int64 (n,)."""
    counts = np.bincount(groups)
    return np.arange(len(groups)) - (np.cumsum(counts) - counts)[groups]


def _round(phase: _Phase, needs: _Numbers, many: int, key: int) -> tuple[int, float]:
    """Makes one exchange for each pair that gains. Returns how many were evaluated, and the share of such pairs."""
    bad, partner = _pairs(phase, key)
    width = phase.slots.shape[1]
    choices = np.stack(np.triu_indices(width, 1)) if many == 2 else np.arange(width)[None]
    ways = choices.shape[1] ** 2
    step = max(1, _IN_STEP // ways)
    gaining = 0
    for start in range(0, len(bad), step):
        part = slice(start, start + step)
        gaining += _exchange_in_step(phase, needs, choices, bad[part], partner[part])
    return len(bad) * ways, gaining / max(1, len(bad))


def _pairs(phase: _Phase, key: int) -> tuple[IntArray, IntArray]:
    """Pairs each bad bin of a phase with another of its group: of a few, the one with most room for the excess.

    No bin is in two pairs. Bad bins stay alone if there are fewer others.
    """
    over, group = phase.over, phase.group
    num_groups = int(group.max()) + 1
    order = grouped_permutation(group, num_groups, key)
    is_bad = (over > 0).any(axis=0)[order]
    bad, good = order[is_bad], order[~is_bad]
    counts = np.bincount(group[good], minlength=num_groups)
    choice = np.clip(counts // np.maximum(np.bincount(group[bad], minlength=num_groups), 1), 1, _CHOICE)[group[bad]]
    at = _within(group[bad]) * choice
    some = at < counts[group[bad]]
    bad, choice, at = bad[some], choice[some], (at + (np.cumsum(counts) - counts)[group[bad]])[some]
    candidates = good[at + np.minimum(np.arange(_CHOICE)[:, None], choice - 1)]
    together = np.maximum(*(use[bad] + use[candidates] for use in over))
    return bad, candidates[together.argmin(axis=0), np.arange(len(bad))]


def _exchange_in_step(phase: _Phase, needs: _Numbers, choices: IntArray, bad: IntArray, partner: IntArray) -> int:
    """Makes the best exchange of each pair that gains. Returns the number of these pairs.

    ``choices`` are the slots that a bin may give together, int64 (1 or 2, choices).
    """
    slots = phase.slots
    mine, theirs = (needs[:, slots[bins][:, choices]].sum(axis=2, dtype=needs.dtype) for bins in (bad, partner))
    over, others = (phase.over[:, bins].astype(needs.dtype) for bins in (bad, partner))
    least = np.abs(over + others)
    cost = np.zeros((len(bad), choices.shape[1] ** 2), needs.dtype)
    for way in range(2):
        left = over[way][:, None] - 2 * mine[way]
        right = others[way][:, None] - 2 * theirs[way]
        difference = (left[:, :, None] - right[:, None, :]).reshape(cost.shape)
        np.abs(difference, out=difference)
        np.maximum(difference, least[way][:, None], out=difference)
        cost += difference
    best = cost.argmin(axis=1)
    gains = np.flatnonzero(cost[np.arange(len(bad)), best] < np.maximum(np.abs(over - others), least).sum(axis=0))
    one, other = np.divmod(best[gains], choices.shape[1])
    bad, partner = bad[gains], partner[gains]
    moved = mine[:, gains, one] - theirs[:, gains, other]
    phase.over[:, bad] -= moved
    phase.over[:, partner] += moved
    for each in choices:
        slots[bad, each[one]], slots[partner, each[other]] = slots[partner, each[other]], slots[bad, each[one]]
    return len(gains)
