"""Packing under two limits: tokens and vision patches per pack.

Patches are nearly a function of tokens, so as a rule one limit decides and the other is rarely touched. The deciding
one (with the greater lower bound) is packed alone, which is fast and tight; packs that break the other limit are
emptied, together with enough packs that have room to spare in it, and their samples packed again under both limits. The
last part runs for all windows at once, since its cost is in the number of numpy operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vlmdata.packing.cells import pack_pairs
from vlmdata.packing.lower_bound import bin_lower_bound
from vlmdata.packing.one_limit import TRY_ALL, Bins, Preference, fill_up, group_items, learn_preference, pack_sizes
from vlmdata.packing.seeding import derive_key, permutation

IntArray = npt.NDArray[np.int64]

# Packs are emptied until their average use of the broken limit is down to this share of it: best fit needs some slack.
_REPACK_LOAD = 0.96
# A limit whose lower bound is below this share of the other's does not decide; in between both ways are tried.
_CLEARLY_LESS = 0.9
# With more than twice as many samples, the better way is found on this many.
_TRIAL_SAMPLES = 200_000


@dataclass(frozen=True, slots=True)
class Limits:
    """What a pack may hold.

    Attributes:
        tokens: In alignment units.
        patches: Or None for no limit.
    """

    tokens: int
    patches: int | None


@dataclass(frozen=True, eq=False, slots=True)
class Window:
    """Samples that are packed together.

    Attributes:
        tokens: int64 (n,), aligned token lengths in alignment units, each in ``[1, limits.tokens]``.
        patches: int64 (n,), each in ``[0, limits.patches]``; not looked at without that limit.
        key: Stream key.
    """

    tokens: IntArray
    patches: IntArray
    key: int


@dataclass(frozen=True, eq=False, slots=True)
class _Draft:
    """A window packed by one limit, before what breaks the other is put right.

    Attributes:
        window: The window.
        items: int64 (m,), the samples packed so far, by position in the window.
        packed: int64 (m,), their use of the packed limit.
        other: int64 (m,), their use of the other limit.
        bins: Bins of positions in ``items``.
        emptied: bool (bins,), to be packed again.
    """

    window: Window
    items: IntArray
    packed: IntArray
    other: IntArray
    bins: Bins
    emptied: npt.NDArray[np.bool_]

    def pool(self) -> IntArray:
        """int64 (k,): positions in ``items`` to be packed again."""
        return np.flatnonzero(self.emptied[self.bins.bin_of_item()])


def pack_windows(windows: Sequence[Window], limits: Limits, key: int) -> list[Bins]:
    """Pack the samples of each window, under a token limit and, if given, a patch limit.

    Args:
        windows: The windows, none empty.
        limits: What a pack may hold.
        key: Stream key for what is done for all windows at once.

    Returns:
        The packs of each window; every sample once, no limit broken. A function of the arguments only.
    """
    max_patches = limits.patches
    if max_patches is None:
        preference = _learn([window.tokens for window in windows], limits.tokens, key)
        return [pack_sizes(window.tokens, limits.tokens, window.key, preference) for window in windows]
    bounds = [(_bound(window.tokens, limits.tokens), _bound(window.patches, max_patches)) for window in windows]
    by_tokens = [at for at, (tokens, patches) in enumerate(bounds) if tokens >= patches * _CLEARLY_LESS]
    by_patches = [at for at, (tokens, patches) in enumerate(bounds) if patches >= tokens * _CLEARLY_LESS]
    both = sorted(set(by_tokens) & set(by_patches))
    if sum(len(windows[at].tokens) for at in both) > 2 * _TRIAL_SAMPLES:
        worse = _trial([windows[at] for at in both], limits.tokens, max_patches, derive_key("trial", key))
        dropped = set(both)
        by_tokens = [at for at in by_tokens if worse != "tokens" or at not in dropped]
        by_patches = [at for at in by_patches if worse != "patches" or at not in dropped]
    found: list[list[Bins]] = [[] for _ in windows]
    for way, chosen in ((_by_tokens, by_tokens), (_by_patches, by_patches)):
        packed = way([windows[at] for at in chosen], limits.tokens, max_patches, key)
        for at, bins in zip(chosen, packed, strict=True):
            found[at].append(bins)
    return [min(ways, key=lambda way: way.num_bins) for ways in found]


def _trial(windows: Sequence[Window], capacity: int, max_patches: int, key: int) -> str:
    """Which way is worse, "tokens" or "patches", on a sample of everything: spares many samples the second way."""
    tokens = np.concatenate([window.tokens for window in windows])
    patches = np.concatenate([window.patches for window in windows])
    drawn = permutation(len(tokens), key)[:_TRIAL_SAMPLES]
    trial = [Window(tokens[drawn], patches[drawn], key)]
    by_tokens = _by_tokens(trial, capacity, max_patches, key)[0].num_bins
    return "tokens" if by_tokens > _by_patches(trial, capacity, max_patches, key)[0].num_bins else "patches"


def lower_bound(tokens: IntArray, patches: IntArray, limits: Limits) -> int:
    """Lower bound on the packs: the greater of the bounds of the two limits taken alone.

    Args:
        tokens: As in :class:`Window`.
        patches: As in :class:`Window`.
        limits: What a pack may hold.

    Returns:
        The bound; 0 without samples.
    """
    bound = _bound(tokens, limits.tokens)
    return bound if limits.patches is None else max(bound, _bound(patches, limits.patches))


def _bound(sizes: IntArray, capacity: int) -> int:
    return bin_lower_bound(*np.unique(sizes, return_counts=True), capacity)


def _learn(parts: Sequence[IntArray], capacity: int, key: int) -> Preference:
    """Many windows need not all try everything."""
    return learn_preference(np.concatenate(parts), capacity, key) if len(parts) > 1 else TRY_ALL


def _by_tokens(windows: Sequence[Window], capacity: int, max_patches: int, key: int) -> list[Bins]:
    """Pack by tokens, then put right what breaks the patch limit."""
    preference = _learn([window.tokens for window in windows], capacity, derive_key("tokens", key))
    drafts = []
    for window in windows:
        bins = pack_sizes(window.tokens, capacity, window.key, preference)
        everything = np.arange(len(window.tokens))
        emptied = _to_empty(bins.sums(window.patches), max_patches)
        drafts.append(_Draft(window, everything, window.tokens, window.patches, bins, emptied))
    repacked = _repack(drafts, capacity, max_patches, derive_key("tokens", key))
    return [
        group_items(draft.items, labels, count) if draft.emptied.any() else draft.bins
        for draft, (labels, count) in zip(drafts, repacked, strict=True)
    ]


def _by_patches(windows: Sequence[Window], capacity: int, max_patches: int, key: int) -> list[Bins]:
    """Pack samples with patches by patches, put right what breaks the token limit; text fills the tokens left over."""
    images = [np.flatnonzero(window.patches) for window in windows]
    # Merged images have a multiple of 4 patches: in that unit there are fewer distinct sizes.
    unit = int(np.gcd.reduce(np.concatenate([w.patches for w in windows]))) if windows else 1
    limit = max_patches // unit
    sizes = [window.patches[some] // unit for window, some in zip(windows, images, strict=True)]
    preference = _learn(sizes, limit, derive_key("patches", key))
    drafts = []
    for window, some, size in zip(windows, images, sizes, strict=True):
        bins = pack_sizes(size, limit, window.key, preference)
        other = window.tokens[some]
        drafts.append(_Draft(window, some, size, other, bins, _to_empty(bins.sums(other), capacity)))
    result = []
    for draft, (label, count) in zip(drafts, _repack(drafts, limit, capacity, derive_key("patches", key)), strict=True):
        text = np.flatnonzero(draft.window.patches == 0)
        used = np.zeros(count, np.int64)
        np.add.at(used, label, draft.other)
        text_label, total = fill_up(
            capacity - used, draft.window.tokens[text], capacity, derive_key("text", draft.window.key)
        )
        items, labels = np.concatenate([draft.items, text]), np.concatenate([label, text_label])
        result.append(group_items(items, labels, total))
    return result


def _repack(drafts: Sequence[_Draft], packed_limit: int, other_limit: int, key: int) -> list[tuple[IntArray, int]]:
    """Pack what was emptied under both limits; per draft int64 (m,) the bin of each of its items, and how many bins."""
    pools = [draft.pool() for draft in drafts]
    if not sum(len(pool) for pool in pools):
        return [(draft.bins.bin_of_item(), draft.bins.num_bins) for draft in drafts]
    again = pack_pairs(
        np.concatenate([draft.packed[pool] for draft, pool in zip(drafts, pools, strict=True)]),
        np.concatenate([draft.other[pool] for draft, pool in zip(drafts, pools, strict=True)]),
        packed_limit,
        other_limit,
        key,
        np.repeat(np.arange(len(drafts)), [len(pool) for pool in pools]),
    )
    result = []
    start = 0
    for draft, pool in zip(drafts, pools, strict=True):
        used, local = np.unique(again[start : start + len(pool)], return_inverse=True)
        start += len(pool)
        kept = ~draft.emptied
        label = (np.cumsum(kept) - 1)[draft.bins.bin_of_item()]
        label[pool] = local + int(kept.sum())
        result.append((label, int(kept.sum()) + len(used)))
    return result


def _to_empty(use: IntArray, limit: int) -> npt.NDArray[np.bool_]:
    """Choose bins to empty: those over the limit, and those that use least, as many as bring the average down."""
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
