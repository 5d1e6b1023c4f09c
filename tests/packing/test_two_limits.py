import tracemalloc
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.packing.helpers import receipts
from vlmdata.packing.bins import cells, two_limits
from vlmdata.packing.bins.cells import pack_pairs
from vlmdata.packing.bins.one_limit import Bins, pack_sizes
from vlmdata.packing.bins.two_limits import Limits, Window, lower_bound, pack_windows
from vlmdata.packing.patterns.lower_bound import bin_lower_bound


def simple_bound(tokens: np.ndarray, patches: np.ndarray, limits: Limits) -> int:
    """Without the linear program, which takes longer than the packing."""
    assert limits.patches is not None
    values = ((tokens, limits.tokens), (patches, limits.patches))
    return max(bin_lower_bound(*np.unique(value, return_counts=True), limit) for value, limit in values)


def pack_samples(tokens: np.ndarray, patches: np.ndarray, capacity: int, max_patches: int, key: int) -> Bins:
    return pack_windows([Window(tokens, patches, key)], Limits(capacity, max_patches), key)[0]


@st.composite
def samples(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int, int]:
    capacity, max_patches = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    count = draw(st.integers(1, 80))
    tokens = draw(st.lists(st.integers(1, capacity), min_size=count, max_size=count))
    patch = st.one_of(st.just(0), st.integers(0, max_patches))
    patches = draw(st.lists(patch, min_size=count, max_size=count))
    return np.array(tokens, np.int64), np.array(patches, np.int64), capacity, max_patches


@given(samples(), st.integers(0, 2**63))
def test_both_limits_hold_and_every_sample_once(case: tuple[np.ndarray, np.ndarray, int, int], key: int) -> None:
    tokens, patches, capacity, max_patches = case
    bins = pack_samples(tokens, patches, capacity, max_patches, key)
    assert sorted(bins.items.tolist()) == list(range(len(tokens)))
    assert (np.diff(bins.offsets) > 0).all()
    assert bins.sums(tokens).max() <= capacity
    assert bins.sums(patches).max() <= max_patches
    assert bins.num_bins >= lower_bound(tokens, patches, Limits(capacity, max_patches))


@given(samples(), st.integers(1, 9), st.integers(1, 4), st.randoms(use_true_random=False))
def test_cells_hold_both_limits(
    case: tuple[np.ndarray, np.ndarray, int, int], cell: int, num_groups: int, random: Random
) -> None:
    tokens, patches, capacity, max_patches = case
    groups = np.array([random.randrange(num_groups) for _ in tokens])
    with pytest.MonkeyPatch.context() as patch:
        # Cells of a few items, so that small cases meet several cells, a part-filled one, and several rounds.
        patch.setattr(cells, "_MIN_CELL_ITEMS", cell)
        patch.setattr(cells, "_MAX_CELL_ITEMS", cell)
        patch.setattr(cells, "_CELLS_IN_STEP", 2)
        labels = pack_pairs(tokens, patches, capacity, max_patches, 3, groups)
    assert sorted(set(labels.tolist())) == list(range(labels.max() + 1))
    assert len(set(zip(labels.tolist(), groups.tolist(), strict=True))) == labels.max() + 1, "groups do not mix"
    assert np.bincount(labels, weights=tokens).max() <= capacity
    assert np.bincount(labels, weights=patches).max() <= max_patches


@pytest.mark.parametrize(
    ("max_patches", "tolerance"),
    [(40_000, 0.002), (24_000, 0.012), (22_000, 0.011), (16_384, 0.005), (8192, 0.06)],
)
def test_degrades_gracefully_as_patches_bind(max_patches: int, tolerance: float) -> None:
    # 20 % of the tokens in text-only samples; from "never binds" through "both bind" to two images a pack.
    table = receipts(8000)
    tokens, patches = table.lengths.astype(np.int64), table.num_patches.astype(np.int64)
    bins = pack_samples(tokens, patches, 8192, max_patches, 0)
    assert bins.sums(tokens).max() <= 8192
    assert bins.sums(patches).max() <= max_patches
    bound = simple_bound(tokens, patches, Limits(8192, max_patches))
    assert bins.num_bins <= bound * (1 + tolerance) + 1


def test_cells_pack_their_worst_bins_again() -> None:
    table = receipts(8000)
    tokens, patches = table.lengths.astype(np.int64), table.num_patches.astype(np.int64)
    num_bins = pack_pairs(tokens, patches, 8192, 22_000, 0).max() + 1
    assert num_bins <= 1.03 * simple_bound(tokens, patches, Limits(8192, 22_000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cells, "_good_bins", lambda first, second, bins, used, *limits: np.ones(used, np.bool_))
        assert num_bins < pack_pairs(tokens, patches, 8192, 22_000, 0).max() + 1


def test_a_limit_that_never_binds_changes_nothing() -> None:
    table = receipts(2000)
    tokens, patches = table.lengths.astype(np.int64), table.num_patches.astype(np.int64)
    free = pack_sizes(tokens, 8192, 9)
    limited = pack_samples(tokens, patches, 8192, 4 * 8192, 9)
    assert limited.items.tolist() == free.items.tolist()


def test_text_fills_the_tokens_that_image_packs_leave() -> None:
    # Two images of 3,000 patches fill a pack's patches and half its tokens; text of the same volume fits in the rest.
    tokens = np.array([1000] * 40 + [100] * 400, np.int64)
    patches = np.array([3000] * 40 + [0] * 400, np.int64)
    bins = pack_samples(tokens, patches, 4000, 6000, 0)
    assert bins.num_bins == 20


def test_windows_do_not_mix_and_come_out_like_single_ones() -> None:
    table = receipts(6000)
    tokens, patches = table.lengths.astype(np.int64), table.num_patches.astype(np.int64)
    cuts = [slice(0, 1000), slice(1000, 1010), slice(1010, 6000)]
    for max_patches in (24_000, 20_000, 12_000):
        limits = Limits(8192, max_patches)
        packed = pack_windows([Window(tokens[c], patches[c], k) for k, c in enumerate(cuts)], limits, 0)
        for cut, bins in zip(cuts, packed, strict=True):
            assert sorted(bins.items.tolist()) == list(range(cut.stop - cut.start))
            assert bins.sums(tokens[cut]).max() <= 8192
            assert bins.sums(patches[cut]).max() <= max_patches
            bound = simple_bound(tokens[cut], patches[cut], limits)
            assert bins.num_bins <= 1.05 * bound + 1


def test_a_trial_spares_the_worse_way(monkeypatch: pytest.MonkeyPatch) -> None:
    table = receipts(6000)
    tokens, patches = table.lengths.astype(np.int64), table.num_patches.astype(np.int64)
    limits = Limits(8192, 23_500)
    both = pack_windows([Window(tokens, patches, 0)], limits, 0)[0].num_bins
    monkeypatch.setattr(two_limits, "_TRIAL_SAMPLES", 1000)
    sizes: list[int] = []
    ways = {name: getattr(two_limits, name) for name in ("_by_tokens", "_by_patches")}
    for name, way in ways.items():

        def spy(windows: list[Window], *rest: int, way: Any = way) -> list[Bins]:
            sizes.extend(len(window.tokens) for window in windows)
            return way(windows, *rest)

        monkeypatch.setattr(two_limits, name, spy)
    bins = pack_windows([Window(tokens, patches, 0)], limits, 0)[0]
    small, again, everything = sorted(sizes)
    assert everything == 6000
    assert small == again == pytest.approx(1000, rel=0.1)
    assert bins.num_bins <= 1.02 * both
    assert bins.sums(tokens).max() <= 8192
    assert bins.sums(patches).max() <= 23_500


@pytest.mark.parametrize("patches", [None, 2**62])
def test_limits_beyond_the_samples_take_no_memory_and_change_nothing(patches: int | None) -> None:
    windows = [Window(np.arange(1, 60), np.arange(59) % 7, key) for key in (1, 2)]
    wanted = pack_windows(windows, Limits(59 * 60, None if patches is None else 59 * 7), 3)
    tracemalloc.start()
    found = pack_windows(windows, Limits(2**31 - 1, patches), 3)
    assert tracemalloc.get_traced_memory()[1] < 1 << 22
    tracemalloc.stop()
    assert [each.items.tolist() for each in found] == [each.items.tolist() for each in wanted]
    assert [each.num_bins for each in found] == [1, 1]
