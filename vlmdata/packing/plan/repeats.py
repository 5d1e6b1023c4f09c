"""Packs the uses of a sample apart, where a mixture uses samples several times in an epoch.

Packing goes by sizes, and the uses of a sample have one size, so they would often share a pack. So the uses of a window
are dealt to groups, those of a sample to different ones, and each group is packed alone. The pack of each group that is
filled least is packed again together with the others like it, so that groups cost next to no packs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from vlmdata.packing.arrays import IntArray
from vlmdata.packing.bins.one_limit import Bins
from vlmdata.packing.bins.two_limits import Limits, Window, pack_windows
from vlmdata.packing.seeding import derive_key, hash64

#: A group has about so many packs at least, or packing it alone would cost some.
_LEAST_PACKS = 8


def pack_apart(windows: Sequence[Window], samples: Sequence[IntArray], limits: Limits, key: int) -> list[Bins]:
    """Packs windows as :func:`pack_windows` does, but without a sample twice in a pack, as far as there are packs.

    Args:
        windows: The windows.
        samples: int64 (n,) of each, the samples that its items use.
        limits: Limits of a pack.
        key: Stream key.

    Returns:
        The packs of each window. Those of a window without repeated samples do not depend on the others having some.
    """
    dealt = [_dealt(window, uses, limits) for window, uses in zip(windows, samples, strict=True)]
    parts = [
        Window(
            window.tokens[group],
            window.patches[group],
            window.key if len(groups) == 1 else derive_key("group", window.key, n),
        )
        for window, groups in zip(windows, dealt, strict=True)
        for n, group in enumerate(groups)
    ]
    packed = pack_windows(parts, limits, key)
    bounds = np.cumsum([0] + [len(groups) for groups in dealt]).tolist()
    joined = []
    for (start, stop), window, groups, uses in zip(pairwise(bounds), windows, dealt, samples, strict=True):
        if len(groups) == 1:
            joined.append(packed[start])
            continue
        packs = [
            group[bins.items[first:last]]
            for group, bins in zip(groups, packed[start:stop], strict=True)
            for first, last in pairwise(bins.offsets.tolist())
        ]
        counts = [bins.num_bins for bins in packed[start:stop]]
        joined.append(_bins(_with_last_ones_joined(packs, counts, window, uses, limits)))
    return joined


def _dealt(window: Window, samples: IntArray, limits: Limits) -> list[IntArray]:
    """Deals the items of a window to groups: ascending positions of each, one group if no sample is repeated."""
    everything = [np.arange(len(samples))]
    order = np.argsort(samples, kind="stable")
    first = np.flatnonzero(np.concatenate([[True], samples[order][1:] != samples[order][:-1]]))
    uses = np.diff(np.append(first, len(samples)))
    packs = int(window.tokens.sum()) // limits.tokens
    if limits.patches:
        packs = max(packs, int(window.patches.sum()) // limits.patches)
    count = min(int(uses.max()), packs // _LEAST_PACKS)
    if count < 2:
        return everything
    # A sample begins at a drawn group, and each further use goes to the next one.
    begin = np.repeat((hash64(len(first), derive_key("groups", window.key)) % np.uint64(count)).astype(np.int64), uses)
    number = np.arange(len(samples)) - np.repeat(first, uses)
    group = np.empty(len(samples), np.int64)
    group[order] = (begin + number) % count
    return [found for n in range(count) if len(found := np.flatnonzero(group == n))]


def _with_last_ones_joined(
    packs: list[IntArray], counts: Sequence[int], window: Window, samples: IntArray, limits: Limits
) -> list[IntArray]:
    """Packs the emptiest pack of each group again with the others; not if samples would meet."""
    ends = np.cumsum(counts).tolist()
    emptiest = {
        min(range(stop - count, stop), key=lambda n: int(window.tokens[packs[n]].sum()))
        for stop, count in zip(ends, counts, strict=True)
    }
    pool = np.concatenate([packs[n] for n in sorted(emptiest)])
    part = Window(window.tokens[pool], window.patches[pool], derive_key("joined", window.key))
    (bins,) = pack_windows([part], limits, part.key)
    again = [pool[bins.items[start:stop]] for start, stop in pairwise(bins.offsets.tolist())]
    if len(again) >= len(emptiest) or any(len(np.unique(samples[each])) < len(each) for each in again):
        return packs
    return [pack for n, pack in enumerate(packs) if n not in emptiest] + again


def _bins(packs: Sequence[IntArray]) -> Bins:
    return Bins(np.concatenate(packs), np.cumsum([0] + [len(pack) for pack in packs]))
