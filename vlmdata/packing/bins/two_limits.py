"""Packing under two limits: tokens and vision patches per pack.

Samples are first packed under one limit alone, which is fast and tight: the limit that decides (with the greater lower
bound), or each in turn if they are close. Packs that exceed the other limit exchange samples, first those with equal
use of the first limit (`evening.py`), then any (`exchanges.py`). Packs that still exceed a limit are emptied, together
with packs that have room, and their samples are packed again under both limits. Exchanges of any samples and packing
again run for all windows at once, because their cost depends on the number of numpy operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from vlmdata.packing.arrays import IntArray, sums_by
from vlmdata.packing.bins.cells import pack_pairs
from vlmdata.packing.bins.evening import even_out
from vlmdata.packing.bins.exchanges import exchange
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
_TRIAL_SAMPLES = 50_000
# Packing by patches may make one pack in so many more than the tokens need, so that exchanges find some room.
_SPARE = 1000


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
    """A packing of a window in which some packs may exceed a limit."""

    window: Window
    labels: IntArray  # int64 (n,), the pack of each sample
    num_bins: int

    def use(self) -> tuple[IntArray, IntArray]:
        """Sums tokens and patches, int64 (packs,) each."""
        labels, window = self.labels, self.window
        return sums_by(labels, window.tokens, self.num_bins), sums_by(labels, window.patches, self.num_bins)

    def broken(self, limits: tuple[int, int]) -> npt.NDArray[np.bool_]:
        """Marks the packs that exceed a limit, bool (packs,)."""
        tokens, patches = self.use()
        return (tokens > limits[0]) | (patches > limits[1])


def pack_windows(windows: Sequence[Window], limits: Limits, key: int) -> list[Bins]:
    """Packs the samples of each window, none empty, under a token limit and, if given, a patch limit.

    ``key`` is the stream key of operations on all windows at once. Returns the packs of each window, with every sample
    once and within both limits. A pure function of the arguments.
    """
    # Larger limits are none. Packing takes memory by the token limit.
    tokens = min(limits.tokens, max((int(window.tokens.sum()) for window in windows), default=1))
    patches = max((int(window.patches.sum()) for window in windows), default=1)
    limits = Limits(tokens, None if limits.patches is None else min(limits.patches, max(patches, 1)))
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
    packed, drafts = [], []
    for window in windows:
        bins = pack_sizes(window.tokens, capacity, window.key, preference)
        labels = bins.bin_of_item()
        packed.append(bins)
        if (bins.sums(window.patches) > max_patches).any():
            labels = even_out(labels, window.tokens, window.patches, max_patches)
        drafts.append(_Draft(window, labels, bins.num_bins))
    limits, key = (capacity, max_patches), derive_key("tokens", key)
    settled = _settle(drafts, limits, key, lambda left: _repack([drafts[at] for at in left], limits, key))
    fits = [not (bins.sums(one.patches) > max_patches).any() for bins, one in zip(packed, windows, strict=True)]
    return [bins if fit else found for bins, fit, found in zip(packed, fits, settled, strict=True)]


def _by_patches(
    windows: Sequence[Window], capacity: int, max_patches: int, key: int, preference: Preference | None = None
) -> list[Bins]:
    """Packs samples with patches by patches, fills up with text, and repairs violations of the token limit."""
    images = [np.flatnonzero(window.patches) for window in windows]
    # Merged images have a multiple of 4 patches, so this unit gives fewer distinct sizes.
    unit = int(np.gcd.reduce(np.concatenate([w.patches for w in windows]))) if windows else 1
    limit = max_patches // unit
    sizes = [window.patches[some] // unit for window, some in zip(windows, images, strict=True)]
    preference = preference or _learn(sizes, limit, derive_key("patches", key))
    packed, drafts = [], []
    for window, some, size in zip(windows, images, sizes, strict=True):
        bins = pack_sizes(size, limit, window.key, preference)
        part = Window(window.tokens[some], window.patches[some], window.key)
        packed.append(_Draft(part, bins.bin_of_item(), bins.num_bins))
        bound = _bound(window.tokens, capacity)
        wanted = max(bins.num_bins, bound + bound // _SPARE)
        drafts.append(_tightened(_with_text(window, packed[-1], capacity), wanted, capacity))
    limits, key = (capacity, max_patches), derive_key("patches", key)

    def repacked(left: Sequence[int]) -> list[_Draft]:
        found = _repack([packed[at] for at in left], limits, key)
        return [_with_text(windows[at], draft, capacity) for at, draft in zip(left, found, strict=True)]

    return _settle(drafts, limits, key, repacked)


def _with_text(window: Window, images: _Draft, capacity: int) -> _Draft:
    """Fills the packs of a window's samples with patches up with its other samples."""
    rooms = np.maximum(capacity - images.use()[0], 0)
    is_text = window.patches == 0
    labels = np.empty(len(is_text), np.int64)
    labels[~is_text] = images.labels
    labels[is_text], total = fill_up(rooms, window.tokens[is_text], capacity, derive_key("text", window.key))
    return _Draft(window, labels, total)


def _tightened(draft: _Draft, wanted: int, capacity: int) -> _Draft:
    """Deals the samples of packs after the first ``wanted`` to the packs with most room, and evens out the tokens."""
    window, labels, num_bins = draft.window, draft.labels.copy(), min(draft.num_bins, wanted)
    rest = np.flatnonzero(labels >= wanted)
    rest = rest[np.argsort(-window.tokens[rest], kind="stable")]
    kept = labels < wanted
    use = sums_by(labels[kept], window.tokens[kept], num_bins)
    for start in range(0, len(rest), num_bins):
        part = rest[start : start + num_bins]
        to = np.argsort(use, kind="stable")[: len(part)]
        labels[part] = to
        use[to] += window.tokens[part]
    if (use > capacity).any():
        labels = even_out(labels, window.patches, window.tokens, capacity)
    return _Draft(window, labels, num_bins)


def _settle(
    drafts: Sequence[_Draft],
    limits: tuple[int, int],
    key: int,
    otherwise: Callable[[Sequence[int]], list[_Draft]],
) -> list[Bins]:
    """Repairs drafts by exchanges.

    If these do not suffice, returns the best of three: packing again, exchanges among more packs followed by packing
    again, and ``otherwise``.
    """
    exchanged = _exchanged(drafts, limits, derive_key("exchanges", key))
    left = [at for at, draft in enumerate(exchanged) if draft.broken(limits).any()]
    if left:
        some = [exchanged[at] for at in left]
        more = [replace(draft, num_bins=draft.num_bins + 1 + draft.num_bins * 2 // _SPARE) for draft in some]
        more = _exchanged(more, limits, derive_key("more", key))
        ways = [*(_repack(each, limits, derive_key("again", key)) for each in (some, more)), otherwise(left)]
        for at, *found in zip(left, *ways, strict=True):
            exchanged[at] = min(found, key=lambda draft: draft.num_bins)
    return [group_items(np.arange(len(draft.labels)), draft.labels, draft.num_bins) for draft in exchanged]


def _exchanged(drafts: Sequence[_Draft], limits: tuple[int, int], key: int) -> list[_Draft]:
    """Exchanges samples between the packs of each draft."""
    result = list(drafts)
    some = [at for at, draft in enumerate(drafts) if draft.broken(limits).any()]
    if not some:
        return result
    counts = np.array([drafts[at].num_bins for at in some])
    firsts = (np.cumsum(counts) - counts).tolist()
    labels = exchange(
        np.concatenate([drafts[at].labels + first for at, first in zip(some, firsts, strict=True)]),
        np.repeat(np.arange(len(some)), counts),
        (
            np.concatenate([drafts[at].window.tokens for at in some]),
            np.concatenate([drafts[at].window.patches for at in some]),
        ),
        limits,
        key,
    )
    ends = np.cumsum([len(drafts[at].labels) for at in some])[:-1]
    for at, first, part in zip(some, firsts, np.split(labels, ends), strict=True):
        used, local = np.unique(part - first, return_inverse=True)
        result[at] = _Draft(drafts[at].window, local, len(used))
    return result


def _repack(drafts: Sequence[_Draft], limits: tuple[int, int], key: int) -> list[_Draft]:
    """Empties packs over a limit and some with room, and packs their samples again under both limits."""
    emptied = []
    for draft in drafts:
        tokens, patches = draft.use()
        emptied.append(_to_empty(tokens, limits[0]) | _to_empty(patches, limits[1]))
    pools = [np.flatnonzero(some[draft.labels]) for draft, some in zip(drafts, emptied, strict=True)]
    counts = [len(pool) for pool in pools]
    if not sum(counts):
        return list(drafts)
    first = np.concatenate([draft.window.tokens[pool] for draft, pool in zip(drafts, pools, strict=True)])
    second = np.concatenate([draft.window.patches[pool] for draft, pool in zip(drafts, pools, strict=True)])
    again = pack_pairs(first, second, *limits, key, np.repeat(np.arange(len(drafts)), counts))
    result = []
    for draft, some, pool, part in zip(drafts, emptied, pools, np.split(again, np.cumsum(counts)[:-1]), strict=True):
        used, local = np.unique(part, return_inverse=True)
        kept = ~some
        labels = (np.cumsum(kept) - 1)[draft.labels]
        labels[pool] = local + int(kept.sum())
        result.append(_Draft(draft.window, labels, int(kept.sum()) + len(used)))
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
