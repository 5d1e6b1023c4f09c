"""Packing under two limits: tokens and vision patches per pack.

Patches are nearly a function of tokens, so usually one limit decides and the other is rarely reached. The deciding
limit (with the greater lower bound) is packed alone, which is fast and tight. Where that is tokens, packs exchange
samples of equal length until few exceed the patches. Packs that violate the other limit are emptied, together with
enough packs that have spare room in it, and their samples are packed again under both limits. The last part runs for
all windows at once, since its cost is the number of numpy operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vlmdata.packing.arrays import IntArray, stable_order, sums_by
from vlmdata.packing.bins.cells import pack_pairs
from vlmdata.packing.bins.one_limit import (
    TRY_ALL,
    WITHOUT_PATTERNS,
    Bins,
    Preference,
    fill_up,
    group_items,
    learn_preference,
    pack_sizes,
)
from vlmdata.packing.patterns.lower_bound import bin_lower_bound
from vlmdata.packing.patterns.program_bound import program_bound
from vlmdata.packing.seeding import derive_key, hash64

# Packs are emptied until their average use of the violated limit is at most this share of it: best fit needs slack.
_REPACK_LOAD = 0.96
# A limit whose lower bound is below this share of the other's does not decide; otherwise both orders are tried.
_CLEARLY_LESS = 0.9
# With more than twice as many samples, the better order is chosen on a subset of this size.
_TRIAL_SAMPLES = 200_000
# If all items of a bin changed at once, it would go from too little to too much. So the items are spread over groups
# that are exchanged one after another, and the items of a size over parts; a bin has about one item in each.
_GROUPS = 32
_PART = 64
_MAX_SWEEPS = 8
# A sweep that leaves more than this share of the excess is the last one.
_WORTHWHILE = 0.9
# Less excess than this share of what all bins may hold is left to the repair.
_NEGLIGIBLE = 1e-4


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a pack."""

    tokens: int  # in alignment units
    patches: int | None


@dataclass(frozen=True, eq=False, slots=True)
class Window:
    """Samples that are packed together."""

    tokens: IntArray  # int64 (n,), aligned token lengths in alignment units, each in [1, limits.tokens]
    patches: IntArray  # int64 (n,), each in [0, limits.patches]; ignored without that limit
    key: int  # stream key


@dataclass(frozen=True, eq=False, slots=True)
class _Draft:
    """A window packed by one limit, before violations of the other are repaired."""

    window: Window
    items: IntArray  # int64 (m,), packed samples, by position in the window
    packed: IntArray  # int64 (m,), their use of the packed limit
    other: IntArray  # int64 (m,), their use of the other limit
    bins: Bins  # bins of positions in items
    emptied: npt.NDArray[np.bool_]  # bool (bins,), bins to pack again

    def pool(self) -> IntArray:
        """Positions in ``items`` to pack again, int64 (k,)."""
        return np.flatnonzero(self.emptied[self.bins.bin_of_item()])


def pack_windows(windows: Sequence[Window], limits: Limits, key: int) -> list[Bins]:
    """Packs the samples of each window, none empty, under a token limit and, if given, a patch limit.

    ``key`` is the stream key of operations on all windows at once. Returns the packs of each window, with every sample
    once and within both limits. A pure function of the arguments.
    """
    max_patches = limits.patches
    if max_patches is None:
        preference = _learn([window.tokens for window in windows], limits.tokens, key)
        return [pack_sizes(window.tokens, limits.tokens, window.key, preference) for window in windows]
    bounds = [(_bound(window.tokens, limits.tokens), _bound(window.patches, max_patches)) for window in windows]
    chosen = {
        _by_tokens: {at for at, (tokens, patches) in enumerate(bounds) if tokens >= patches * _CLEARLY_LESS},
        _by_patches: {at for at, (tokens, patches) in enumerate(bounds) if patches >= tokens * _CLEARLY_LESS},
    }
    both = sorted(set.intersection(*chosen.values()))
    if sum(len(windows[at].tokens) for at in both) > 2 * _TRIAL_SAMPLES:
        worse = _worse([windows[at] for at in both], limits.tokens, max_patches, derive_key("trial", key))
        chosen[worse].difference_update(both)
    found: list[list[Bins]] = [[] for _ in windows]
    for way, some in chosen.items():
        packed = way([windows[at] for at in sorted(some)], limits.tokens, max_patches, key)
        for at, bins in zip(sorted(some), packed, strict=True):
            found[at].append(bins)
    return [min(ways, key=lambda way: way.num_bins) for ways in found]


def _worse(windows: Sequence[Window], capacity: int, max_patches: int, key: int) -> Callable[..., list[Bins]]:
    """Returns the worse way to pack a subset, so that only the other one runs on all samples."""
    tokens = np.concatenate([window.tokens for window in windows])
    patches = np.concatenate([window.patches for window in windows])
    drawn = np.flatnonzero(hash64(len(tokens), key) < np.uint64(_TRIAL_SAMPLES * 2**64 // len(tokens)))
    trial = [Window(tokens[drawn], patches[drawn], key)]
    ways = (_by_patches, _by_tokens)
    return max(ways, key=lambda way: way(trial, capacity, max_patches, key, WITHOUT_PATTERNS)[0].num_bins)


def lower_bound(tokens: IntArray, patches: IntArray, limits: Limits) -> int:
    """Returns a lower bound on the packs of samples as in :class:`Window`; 0 without samples.

    It is the greater of the two limits' linear programs.
    """
    bound = program_bound(*np.unique(tokens, return_counts=True), limits.tokens)
    if limits.patches is None:
        return bound
    unit = max(1, int(np.gcd.reduce(patches)))  # fewer distinct sizes, and a smaller knapsack
    return max(bound, program_bound(*np.unique(patches // unit, return_counts=True), limits.patches // unit))


def volume_bound(tokens: IntArray, patches: IntArray, limits: Limits) -> int:
    """Returns the packs that the sums alone need: volume over capacity, for the limit that needs more."""
    bound = -(-int(tokens.sum()) // limits.tokens)
    return bound if limits.patches is None else max(bound, -(-int(patches.sum()) // limits.patches))


def _bound(sizes: IntArray, capacity: int) -> int:
    counts = np.bincount(sizes)
    distinct = np.flatnonzero(counts)
    return bin_lower_bound(distinct, counts[distinct], capacity)


def _learn(parts: Sequence[IntArray], capacity: int, key: int) -> Preference:
    """Ranks the strategies once, so that many windows need not try them all."""
    return learn_preference(np.concatenate(parts), capacity, key) if len(parts) > 1 else TRY_ALL


def _by_tokens(
    windows: Sequence[Window], capacity: int, max_patches: int, key: int, preference: Preference | None = None
) -> list[Bins]:
    """Packs by tokens, then repairs violations of the patch limit."""
    preference = preference or _learn([window.tokens for window in windows], capacity, derive_key("tokens", key))
    drafts = []
    for window in windows:
        bins = pack_sizes(window.tokens, capacity, window.key, preference)
        everything = np.arange(len(window.tokens))
        if (bins.sums(window.patches) > max_patches).any():
            labels = even_out(bins.bin_of_item(), window.tokens, window.patches, max_patches)
            bins = group_items(everything, labels, bins.num_bins)
        emptied = _to_empty(bins.sums(window.patches), max_patches)
        drafts.append(_Draft(window, everything, window.tokens, window.patches, bins, emptied))
    repacked = _repack(drafts, capacity, max_patches, derive_key("tokens", key))
    return [
        group_items(draft.items, labels, count) if draft.emptied.any() else draft.bins
        for draft, (labels, count) in zip(drafts, repacked, strict=True)
    ]


def _by_patches(
    windows: Sequence[Window], capacity: int, max_patches: int, key: int, preference: Preference | None = None
) -> list[Bins]:
    """Packs samples with patches by patches, repairs violations of the token limit, and fills the rest with text."""
    images = [np.flatnonzero(window.patches) for window in windows]
    # Merged images have a multiple of 4 patches, so this unit gives fewer distinct sizes.
    unit = int(np.gcd.reduce(np.concatenate([w.patches for w in windows]))) if windows else 1
    limit = max_patches // unit
    sizes = [window.patches[some] // unit for window, some in zip(windows, images, strict=True)]
    preference = preference or _learn(sizes, limit, derive_key("patches", key))
    drafts = []
    for window, some, size in zip(windows, images, sizes, strict=True):
        bins = pack_sizes(size, limit, window.key, preference)
        other = window.tokens[some]
        drafts.append(_Draft(window, some, size, other, bins, _to_empty(bins.sums(other), capacity)))
    result = []
    for draft, (label, count) in zip(drafts, _repack(drafts, limit, capacity, derive_key("patches", key)), strict=True):
        text = np.flatnonzero(draft.window.patches == 0)
        rooms = capacity - sums_by(label, draft.other, count)
        text_label, total = fill_up(rooms, draft.window.tokens[text], capacity, derive_key("text", draft.window.key))
        items, labels = np.concatenate([draft.items, text]), np.concatenate([label, text_label])
        result.append(group_items(items, labels, total))
    return result


def _repack(drafts: Sequence[_Draft], packed_limit: int, other_limit: int, key: int) -> list[tuple[IntArray, int]]:
    """Packs emptied samples under both limits. Returns, per draft, each item's bin, int64 (m,), and the bin count."""
    pools = [draft.pool() for draft in drafts]
    counts = [len(pool) for pool in pools]
    if not sum(counts):
        return [(draft.bins.bin_of_item(), draft.bins.num_bins) for draft in drafts]
    packed = np.concatenate([draft.packed[pool] for draft, pool in zip(drafts, pools, strict=True)])
    other = np.concatenate([draft.other[pool] for draft, pool in zip(drafts, pools, strict=True)])
    again = pack_pairs(packed, other, packed_limit, other_limit, key, np.repeat(np.arange(len(drafts)), counts))
    result = []
    for draft, pool, part in zip(drafts, pools, np.split(again, np.cumsum(counts)[:-1]), strict=True):
        used, local = np.unique(part, return_inverse=True)
        kept = ~draft.emptied
        label = (np.cumsum(kept) - 1)[draft.bins.bin_of_item()]
        label[pool] = local + int(kept.sum())
        result.append((label, int(kept.sum()) + len(used)))
    return result


def _to_empty(use: IntArray, limit: int) -> npt.NDArray[np.bool_]:
    """Chooses bins to empty: those over the limit, and enough of the emptiest to reduce the average."""
    broken = use > limit
    if not broken.any():
        return broken
    target = int(limit * _REPACK_LOAD)
    excess = int((use[broken] - target).sum())
    spare = np.where(broken, 0, np.maximum(target - use, 0))
    order = np.argsort(-spare, kind="stable")
    count = min(int(np.searchsorted(np.cumsum(spare[order]), excess)) + 1, int((spare > 0).sum()))
    broken[order[:count]] = True
    return broken


def even_out(labels: IntArray, sizes: IntArray, other: IntArray, limit: int) -> IntArray:
    """Exchanges items of equal size until few bins exceed the limit of their other use, all int64 (n,).

    No bin may be empty. Returns the bin of each item: the given ones if exchanges reduce the excess by less than half.
    """
    use = sums_by(labels, other, int(labels.max()) + 1)
    least = before = _excess(use, limit)
    if least <= limit * len(use) * _NEGLIGIBLE:
        return labels
    groups = _Groups.of(sizes, other)
    bins = best = labels[groups.items]
    needs = other[groups.items]
    for _ in range(_MAX_SWEEPS):
        bins = _sweep(bins, needs, use, groups)
        last, excess = least, _excess(use, limit)
        if excess < least:
            best, least = bins, excess
        if excess > last * _WORTHWHILE or least <= limit * len(use) * _NEGLIGIBLE:
            break
    if 2 * least >= before:
        return labels
    found = np.empty_like(labels)
    found[groups.items] = best
    return found


@dataclass(frozen=True, eq=False, slots=True)
class _Groups:
    """Items by group, within a group by part, and within a part by decreasing use of the second limit."""

    items: IntArray  # int64 (n,), positions of items
    parts: IntArray  # int64 (n,), number of each one's part within its group, non-decreasing in a group
    bounds: tuple[int, ...]  # group g is [bounds[g], bounds[g + 1])

    @classmethod
    def of(cls, sizes: IntArray, other: IntArray) -> _Groups:
        """Spreads the items of each size over parts, and the parts over groups."""
        most = int(other.max())
        order = stable_order(sizes * (most + 1) + (most - other), (int(sizes.max()) + 1) * (most + 1))
        first = np.flatnonzero(np.concatenate([[True], np.diff(sizes[order]) != 0]))
        counts = np.diff(first, append=len(order))
        parts = -(-counts // _PART)
        within = np.arange(len(order)) - np.repeat(first, counts)
        number = np.repeat(np.cumsum(parts) - parts, counts) + within % np.repeat(parts, counts)
        part, group = np.divmod(number, _GROUPS)
        in_group = -(-int(parts.sum()) // _GROUPS)
        by_group = stable_order(group * in_group + part, _GROUPS * in_group)
        bounds = np.cumsum(np.bincount(group, minlength=_GROUPS)).tolist()
        return cls(order[by_group], part[by_group], (0, *bounds))


def _sweep(bins: IntArray, needs: IntArray, use: IntArray, groups: _Groups) -> IntArray:
    """Exchanges the items of one group after another; all arrays are int64, in the order of ``groups``.

    ``use`` is the bins' use of the second limit, and is brought up to date. Returns the new bins, int64 (n,).
    """
    found = np.empty_like(bins)
    for start, stop in zip(groups.bounds, groups.bounds[1:], strict=False):
        if start == stop:
            continue
        old, need, part = bins[start:stop], needs[start:stop], groups.parts[start:stop]
        # The places of each part, the one whose bin uses least first.
        rest = use[old] - need
        most = int(rest.max()) + 1
        new = old[stable_order(part * most + rest, (int(part[-1]) + 1) * most)]
        np.subtract.at(use, old, need)
        np.add.at(use, new, need)
        found[start:stop] = new
    return found


def _excess(use: IntArray, limit: int) -> int:
    return int(np.maximum(use - limit, 0).sum())
