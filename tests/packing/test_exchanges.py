"""Exchanging items between bins until none is over one of two limits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmdata.packing.bins import two_limits
from vlmdata.packing.bins.exchanges import exchange
from vlmdata.packing.bins.two_limits import Limits, Window, pack_windows
from vlmdata.packing.seeding import hash64


def sums(labels: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    return np.bincount(labels, values, count).astype(np.int64)


def excess(labels: np.ndarray, uses: tuple[np.ndarray, np.ndarray], limits: tuple[int, int], count: int) -> int:
    first, second = (
        np.maximum(sums(labels, use, count) - limit, 0).sum() for use, limit in zip(uses, limits, strict=True)
    )
    return int(first * limits[1] + second * limits[0])


def pairs(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Sizes without a relation to each other, hardly two alike."""
    noise = hash64(count, 3)
    return (noise % 2900 + 100).astype(np.int64), (noise >> 20).astype(np.int64) % 2000 * 4


@st.composite
def packings(
    draw: st.DrawFn,
) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray], tuple[int, int]]:
    """Labels, some bins empty; groups, some without bins; uses; limits that hold for single items."""
    limits = draw(st.integers(1, 30)), draw(st.sampled_from([1, 7, 30, 40_000, 10**9]))
    group = np.array(draw(st.lists(st.integers(0, 3), min_size=1, max_size=12)), np.int64)
    count = draw(st.integers(1, 60))
    column = [
        draw(st.lists(st.integers(low, limit), min_size=count, max_size=count))
        for low, limit in zip((1, 0), limits, strict=True)
    ]
    labels = np.array(draw(st.lists(st.integers(0, len(group) - 1), min_size=count, max_size=count)), np.int64)
    return labels, group, (np.array(column[0], np.int64), np.array(column[1], np.int64)), limits


@given(packings(), st.integers(0, 2**63))
def test_groups_keep_their_items_and_the_excess_never_rises(
    case: tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray], tuple[int, int]], key: int
) -> None:
    labels, group, uses, limits = case
    before = labels.copy()
    found = exchange(labels, group, uses, limits, key)
    assert labels.tolist() == before.tolist()
    assert group[found].tolist() == group[labels].tolist()
    assert excess(found, uses, limits, len(group)) <= excess(labels, uses, limits, len(group))
    assert exchange(labels, group, uses, limits, key).tolist() == found.tolist()


def test_single_items_change_places() -> None:
    uses = np.array([6, 6, 2, 2]), np.array([1, 1, 1, 1])
    found = exchange(np.array([0, 0, 1, 1]), np.zeros(2, np.int64), uses, (8, 2), 0)
    assert sums(found, uses[0], 2).tolist() == [8, 8]


def test_an_item_moves_to_an_empty_bin() -> None:
    uses = np.array([5, 5]), np.array([0, 0])
    assert sorted(exchange(np.array([0, 0]), np.zeros(2, np.int64), uses, (8, 4), 0).tolist()) == [0, 1]


def test_two_items_change_places_with_two() -> None:
    # 34 and 30 where 32 fit: no item may go for one or none of the others, as all these differences are at least 4, or
    # at most 0. 10 and 4 may for 6 and 6.
    first, second = [10, 4, 20], [6, 6, 4, 14]
    assert not any(0 < one - other < 4 for one in [*first, 0] for other in [*second, 0])
    uses = np.array(first + second), np.zeros(7, np.int64)
    labels, group = np.array([0, 0, 0, 1, 1, 1, 1]), np.zeros(2, np.int64)
    assert sums(exchange(labels, group, uses, (32, 1), 0), uses[0], 2).tolist() == [32, 32]


def test_other_groups_and_groups_without_room_stay() -> None:
    uses = np.array([9, 9, 1, 1]), np.zeros(4, np.int64)
    labels, group = np.array([0, 0, 1, 1]), np.array([0, 1])
    assert exchange(labels, group, uses, (10, 1), 0).tolist() == labels.tolist()
    assert exchange(labels, np.zeros(2, np.int64), uses, (9, 1), 0).tolist() == labels.tolist()


def test_most_bins_of_unlike_items_come_within_both_limits() -> None:
    uses = pairs(6000)
    labels, limits = np.arange(6000) % 1200, (8192, 21_500)
    found = exchange(labels, np.zeros(1200, np.int64), uses, limits, 1)
    assert excess(labels, uses, limits, 1200) > 0
    assert excess(found, uses, limits, 1200) == 0
    assert len(set(exchange(labels, np.zeros(1200, np.int64), uses, limits, 2)[:200] - found[:200])) > 1, "by key"


@pytest.mark.parametrize(
    ("limits", "most"), [((8192, 20_480), 1.003), ((8192, 19_000), 1.003), ((8192, 18_000), 1.003)]
)
def test_receipts_under_two_binding_limits_come_near_the_bound(limits: tuple[int, int], most: float) -> None:
    noise = hash64(10_000, 11)
    image = (900 + noise % np.uint64(77)).astype(np.int64)
    text = (50 + (noise >> np.uint64(20)) % np.uint64(500)).astype(np.int64)
    tokens, patches = image + text, np.where((noise >> np.uint64(40)) % np.uint64(5), 4 * image, 0)
    window, both = Window(tokens, patches, 0), Limits(*limits)
    bins = pack_windows([window], both, 0)[0]
    assert bins.sums(tokens).max() <= limits[0]
    assert bins.sums(patches).max() <= limits[1]
    assert bins.num_bins <= most * two_limits.lower_bound(tokens, patches, both) + 1
