import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.packing.helpers import neighbours_of
from vlmdata.packing.bins import few_bins, one_limit
from vlmdata.packing.bins.few_bins import pack_few
from vlmdata.packing.bins.one_limit import pack_sizes
from vlmdata.packing.patterns.program_bound import program_bound
from vlmdata.packing.seeding import hash64


def between(least: int, beyond: int, count: int) -> np.ndarray:
    """Sizes in [least, beyond), not from numpy's generators, which promise no stable distributions."""
    return (least + hash64(count, 3) % np.uint64(beyond - least)).astype(np.int64)


def bound_of(sizes: np.ndarray, capacity: int) -> int:
    return program_bound(*np.unique(sizes, return_counts=True), capacity)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(0, 20), st.integers(0, 3))
def test_every_item_is_in_a_bin_that_nothing_left_fills_better(items: list[int], more: int, key: int) -> None:
    capacity = max(items) + more
    sizes, counts = np.unique(items, return_counts=True)
    sizes, counts = sizes[::-1].copy(), counts[::-1].copy()
    packing = pack_few(sizes, counts, capacity, key, 0)
    assert packing is not None
    loads = np.zeros(packing.num_bins, np.int64)
    placed = np.zeros(len(sizes), np.int64)
    for index, first, bins, copies in packing.runs.tolist():
        assert bins == 1
        loads[first] += sizes[index] * copies
        placed[index] += copies
    assert placed.tolist() == counts.tolist()
    assert 0 < loads.min() <= loads.max() <= capacity
    assert packing.num_bins >= bound_of(np.array(items), capacity)


@given(st.lists(st.integers(1, 30), max_size=10), st.integers(0, 60))
def test_the_fullest_choice_is_the_best_of_all(sizes: list[int], room: int) -> None:
    taken, _ = few_bins._fullest(sizes, room)
    sums = {sum(chosen) for count in range(len(sizes) + 1) for chosen in itertools.combinations(sizes, count)}
    assert len(set(taken)) == len(taken)
    assert sum(sizes[index] for index in taken) == max(each for each in sums if each <= room)


@pytest.mark.parametrize(
    ("sizes", "capacity", "before", "now"),
    [
        (between(700, 1300, 200), 3000, 1, 0),
        (between(900, 2500, 400), 4096, 3, 1),
        (between(800, 1500, 300), 4096, 4, 1),
    ],
    ids=["thirds", "large", "narrow"],
)
def test_lengths_that_occur_once_come_to_the_bound(
    sizes: np.ndarray, capacity: int, before: int, now: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = bound_of(sizes, capacity)
    for key in range(3):
        bins = pack_sizes(sizes, capacity, key)
        assert sorted(bins.items.tolist()) == list(range(len(sizes)))
        assert bins.sums(sizes).max() <= capacity
        assert bins.num_bins <= bound + now
    monkeypatch.setattr(one_limit, "_FEW_BINS", 0)
    assert pack_sizes(sizes, capacity, 0, one_limit.WITHOUT_PATTERNS).num_bins >= bound + before


def test_many_small_items_are_left_to_the_other_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = between(700, 1300, 200)
    distinct, counts = np.unique(sizes, return_counts=True)
    monkeypatch.setattr(few_bins, "_MAX_WORK", 10**6)
    assert pack_few(distinct[::-1], counts[::-1], 3000, 0, 0) is None
    assert sorted(pack_sizes(sizes, 3000, 0).items.tolist()) == list(range(len(sizes)))


def test_epochs_have_other_neighbours() -> None:
    sizes = between(700, 1300, 200)
    neighbours = [neighbours_of(pack_sizes(sizes, 3000, key)) for key in (1, 2)]
    assert len(neighbours[0] & neighbours[1]) < 0.1 * len(neighbours[0])


def test_packings_are_pinned() -> None:
    # Other machines, numpy versions and later versions of this package must come to the same. If this changes on
    # purpose, raise ALGORITHM_VERSION.
    bins = pack_sizes(between(700, 1300, 200), 3000, 7)
    digest = hashlib.sha256(np.concatenate([[bins.num_bins], bins.items, bins.offsets]).astype("<i8").tobytes())
    assert digest.hexdigest()[:16] == "44ef3ddaff547e46"
