import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.packing.helpers import best_fit_decreasing
from vlmdata.packing.bins.one_limit import Bins, Preference, fill_up, group_items, learn_preference, pack_sizes
from vlmdata.packing.patterns.histogram import STRATEGIES, Strategy, pack_histogram
from vlmdata.packing.patterns.lower_bound import bin_lower_bound

PLAIN = Strategy(None, 0.0)


@st.composite
def items(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    capacity = draw(st.integers(1, 60))
    # A narrow range is where look-ahead does something, a wide one where it must not get in the way.
    low = draw(st.integers(1, capacity))
    high = draw(st.integers(low, capacity))
    sizes = draw(st.lists(st.integers(low, high), min_size=1, max_size=120))
    return np.array(sizes, dtype=np.int64), capacity


def check(bins: Bins, sizes: np.ndarray, capacity: int) -> None:
    assert sorted(bins.items.tolist()) == list(range(len(sizes)))
    assert (np.diff(bins.offsets) > 0).all()
    assert bins.offsets[-1] == len(sizes)
    assert bins.sums(sizes).max() <= capacity


def histogram(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    distinct, counts = np.unique(sizes, return_counts=True)
    return distinct[::-1], counts[::-1]


@given(items(), st.integers(0, 2**63))
def test_every_item_once_and_no_bin_over_capacity(case: tuple[np.ndarray, int], key: int) -> None:
    sizes, capacity = case
    check(pack_sizes(sizes, capacity, key), sizes, capacity)


@given(items())
def test_histogram_equals_item_by_item_best_fit_decreasing(case: tuple[np.ndarray, int]) -> None:
    sizes, capacity = case
    packing = pack_histogram(*histogram(sizes), capacity, PLAIN)
    assert packing.num_bins == best_fit_decreasing(sizes.tolist(), capacity)


@given(items(), st.integers(0, 2**63))
def test_never_more_bins_than_best_fit_decreasing(case: tuple[np.ndarray, int], key: int) -> None:
    sizes, capacity = case
    assert pack_sizes(sizes, capacity, key).num_bins <= best_fit_decreasing(sizes.tolist(), capacity)


@given(items(), st.sampled_from(STRATEGIES), st.data())
def test_every_strategy_places_every_item_within_capacity(
    case: tuple[np.ndarray, int], strategy: Strategy, data: st.DataObject
) -> None:
    sizes, capacity = case
    distinct, counts = histogram(sizes)
    openers = np.array([data.draw(st.integers(0, count)) for count in counts.tolist()])
    packing = pack_histogram(distinct, counts, capacity, strategy, openers=openers)
    loads = np.zeros(packing.num_bins, np.int64)
    placed = np.zeros(len(distinct), np.int64)
    for index, first, bins, copies in packing.runs.tolist():
        loads[first : first + bins] += distinct[index] * copies
        placed[index] += bins * copies
    assert placed.tolist() == counts.tolist()
    assert loads.min() > 0
    assert loads.max() <= capacity


@given(st.lists(st.integers(0, 30), max_size=20), st.lists(st.integers(1, 30), max_size=40))
def test_fill_up_uses_existing_room_first(rooms: list[int], sizes: list[int]) -> None:
    labels, num_bins = fill_up(np.array(rooms, np.int64), np.array(sizes, np.int64), 30, 1)
    room = np.array([*rooms, *[30] * (num_bins - len(rooms))], np.int64)
    np.subtract.at(room, labels, np.array(sizes, np.int64))
    assert (room >= 0).all()
    new = labels[labels >= len(rooms)]
    assert sorted(set(new.tolist())) == list(range(len(rooms), num_bins))
    if num_bins > len(rooms):
        # Best fit opens a bin only for an item that no bin had room for; room never grows.
        largest = max(size for size, label in zip(sizes, labels.tolist(), strict=True) if label >= len(rooms))
        assert all(left < largest for left in room[: len(rooms)].tolist())


@pytest.mark.parametrize(
    ("name", "tolerance"), [("receipts", 0.002), ("narrow", 0.004), ("mixed", 0.0005), ("long", 0.0005)]
)
def test_fill_is_near_the_lower_bound(name: str, tolerance: float) -> None:
    rng = np.random.default_rng(5)
    count, capacity = 30_000, 8192
    sizes = {
        "receipts": rng.normal(1250, 280, count).clip(400, 2600),
        "narrow": rng.normal(900, 100, count).clip(600, 1200),
        "long": rng.lognormal(6.3, 1.1, count).clip(16, capacity),
        "mixed": np.where(rng.random(count) < 0.5, rng.normal(1250, 280, count), rng.lognormal(5.5, 0.9, count)).clip(
            10, capacity
        ),
    }[name].astype(np.int64)
    bins = pack_sizes(sizes, capacity, 0)
    check(bins, sizes, capacity)
    bound = bin_lower_bound(*np.unique(sizes, return_counts=True), capacity)
    assert bins.num_bins <= bound * (1 + tolerance) + 1


def test_lookahead_beats_plain_best_fit_on_a_narrow_range() -> None:
    sizes = np.random.default_rng(0).integers(600, 1200, 20_000)
    plain = pack_histogram(*histogram(sizes), 8192, PLAIN).num_bins
    assert pack_sizes(sizes, 8192, 0).num_bins < 0.99 * plain


@settings(max_examples=30)
@given(items(), st.integers(0, 2**63))
def test_same_key_same_bins(case: tuple[np.ndarray, int], key: int) -> None:
    sizes, capacity = case
    one, two = pack_sizes(sizes, capacity, key), pack_sizes(sizes.copy(), capacity, key)
    assert one.items.tolist() == two.items.tolist()
    assert one.offsets.tolist() == two.offsets.tolist()


def test_a_preference_is_tried_in_order_until_one_is_good_enough() -> None:
    sizes = np.random.default_rng(0).integers(600, 1200, 20_000)
    good = pack_sizes(sizes, 8192, 0).num_bins
    bound = bin_lower_bound(*np.unique(sizes, return_counts=True), 8192)
    content = Preference((PLAIN, *STRATEGIES), 1.0)
    assert pack_sizes(sizes, 8192, 0, content).num_bins == best_fit_decreasing(sizes.tolist(), 8192) > good
    strict = Preference((PLAIN, *STRATEGIES), good / bound - 1 + 1e-4)
    assert pack_sizes(sizes, 8192, 0, strict).num_bins <= good + 2


def test_the_learned_preference_is_what_was_best() -> None:
    sizes = np.random.default_rng(0).integers(600, 1200, 20_000)
    preference = learn_preference(sizes, 8192, 0)
    assert sorted(map(repr, preference.strategies)) == sorted(map(repr, STRATEGIES))
    assert preference.strategies[0].lookahead is not None, "plain best fit is worse on these"
    assert preference.strategies[-1].lookahead is None
    assert 0.001 <= preference.excess < 0.01


def test_unique_sizes_still_meet_new_neighbours() -> None:
    # Every size occurs once, so the histogram alone would pack the same bins for every key.
    sizes = np.random.default_rng(0).permutation(np.arange(400, 1600))
    neighbours = []
    for key in (1, 2):
        bins = pack_sizes(sizes, 8192, key)
        members = [bins.items[a:b].tolist() for a, b in zip(bins.offsets, bins.offsets[1:], strict=False)]
        neighbours.append({(a, b) for bin_ in members for a in bin_ for b in bin_ if a < b})
    assert len(neighbours[0] & neighbours[1]) < 0.3 * len(neighbours[0])


def test_equal_sizes_are_dealt_at_random() -> None:
    sizes = np.full(1000, 7, np.int64)
    together = []
    for key in (1, 2):
        bins = pack_sizes(sizes, 70, key)
        assert bins.num_bins == 100
        label = bins.bin_of_item()
        together.append(label[:, None] == label[None])
    # Two of 1,000 items share one of 100 bins with probability 9 / 999.
    again = (together[0] & together[1]).sum() - 1000
    assert again < 0.05 * (together[0].sum() - 1000)


def test_no_items() -> None:
    assert pack_sizes(np.zeros(0, np.int64), 10, 0).num_bins == 0


def test_reordered_moves_whole_bins() -> None:
    bins = group_items(np.array([4, 3, 2, 1, 0]), np.array([0, 1, 1, 2, 0]), 3)
    assert bins.items.tolist() == [4, 0, 3, 2, 1]
    moved = bins.reordered(np.array([2, 0, 1]))
    assert moved.items.tolist() == [1, 4, 0, 3, 2]
    assert moved.offsets.tolist() == [0, 1, 3, 5]
    assert moved.bin_of_item().tolist() == [1, 0, 2, 2, 1]
