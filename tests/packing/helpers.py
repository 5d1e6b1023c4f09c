"""Sample tables, hypothesis strategies and slow reference algorithms for the packing tests."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from vlmdata.packing import EpochPlan, SampleTable, concatenate_tables
from vlmdata.packing.bins.one_limit import Bins

IntArray = npt.NDArray[np.int64]


def make_table(lengths: npt.ArrayLike, patches: npt.ArrayLike | None = None, shard_size: int = 10) -> SampleTable:
    """One dataset; each sample's patches are one image."""
    tokens = np.asarray(lengths, dtype=np.int32)
    counts = np.zeros(len(tokens), np.int32) if patches is None else np.asarray(patches, dtype=np.int32)
    return SampleTable(
        lengths=tokens,
        num_targets=tokens // 3,
        num_patches=counts,
        sum_patches_squared=counts.astype(np.int64) ** 2,
        shard=(np.arange(len(tokens)) // shard_size).astype(np.int32),
        dataset=np.zeros(len(tokens), np.int32),
    )


def receipts(count: int, seed: int = 0, shard_size: int = 100) -> SampleTable:
    """Lengths and patches like scanned receipts, a tenth of them text only."""
    rng = np.random.default_rng(seed)
    image = np.clip(rng.normal(900, 200, count), 64, 1300).astype(int) * (rng.random(count) < 0.9)
    text = np.clip(rng.lognormal(5.6, 0.6, count), 20, 3000).astype(int)
    return make_table(image + text, image * 4, shard_size)


def blended(*sizes: int, seed: int = 0, shard_size: int = 10) -> SampleTable:
    """Several datasets with different mean lengths."""
    rng = np.random.default_rng(seed)
    tables = [
        make_table(rng.integers(10 * (k + 1), 60 * (k + 1), size), shard_size=shard_size)
        for k, size in enumerate(sizes)
    ]
    return concatenate_tables(tables)


@st.composite
def tables(draw: st.DrawFn, max_length: int = 64, max_patches: int = 64) -> SampleTable:
    """Tables of 1 to 60 samples in up to 3 datasets; half of the samples have no patches."""
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        count = draw(st.integers(1, 20))
        lengths = draw(st.lists(st.integers(1, max_length), min_size=count, max_size=count))
        patch = st.one_of(st.just(0), st.integers(0, max_patches))
        patches = draw(st.lists(patch, min_size=count, max_size=count))
        parts.append(make_table(lengths, patches, shard_size=draw(st.integers(1, 8))))
    return concatenate_tables(parts)


def best_fit_decreasing(sizes: list[int], capacity: int) -> int:
    """Bins that item-by-item best-fit-decreasing uses."""
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [room for room in rooms if room >= size]
        if fitting:
            rooms[rooms.index(min(fitting))] -= size
        else:
            rooms.append(capacity - size)
    return len(rooms)


def fewest_bins(sizes: list[int], capacity: int) -> int:
    """The optimum, by trying every assignment of a handful of items."""
    for bins in range(1, len(sizes) + 1):
        for labels in itertools.product(range(bins), repeat=len(sizes)):
            loads = [0] * bins
            for size, label in zip(sizes, labels, strict=True):
                loads[label] += size
            if max(loads) <= capacity:
                return bins
    return 0


def uses(plan: EpochPlan) -> Counter[tuple[int, int]]:
    """(table position, repeat) of every use in the plan."""
    return Counter(zip(plan.samples.tolist(), plan.repeats.tolist(), strict=True))


def pack_sets(plan: EpochPlan) -> list[frozenset[tuple[int, int]]]:
    """The uses of each pack, as read through the public accessor."""
    packs = (plan.pack(number) for number in range(plan.num_packs))
    return [frozenset(zip(p.samples.tolist(), p.repeats.tolist(), strict=True)) for p in packs]


def neighbours_of(bins: Bins) -> set[tuple[int, int]]:
    """Pairs of items that share a bin, the smaller position first."""
    members = (bins.items[a:b].tolist() for a, b in itertools.pairwise(bins.offsets.tolist()))
    return {(a, b) for bin_ in members for a in bin_ for b in bin_ if a < b}
