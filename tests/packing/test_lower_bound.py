import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.packing.helpers import best_fit_decreasing, fewest_bins
from vlmdata.packing.patterns.lower_bound import bin_lower_bound


def bound(sizes: list[int], capacity: int) -> int:
    return bin_lower_bound(*np.unique(sizes, return_counts=True), capacity)


@given(st.integers(3, 12), st.lists(st.integers(0, 12), max_size=6))
def test_never_above_the_optimum(capacity: int, sizes: list[int]) -> None:
    fitting = [min(size, capacity) for size in sizes]
    assert bound(fitting, capacity) <= fewest_bins(fitting, capacity)


@given(st.integers(2, 40), st.lists(st.integers(1, 40), max_size=60))
def test_between_volume_and_a_real_packing(capacity: int, sizes: list[int]) -> None:
    fitting = [min(size, capacity) for size in sizes]
    assert -(-sum(fitting) // capacity) <= bound(fitting, capacity) <= best_fit_decreasing(fitting, capacity)


@pytest.mark.parametrize(
    ("sizes", "capacity", "expected"),
    [
        ([], 10, 0),
        ([10], 10, 1),
        ([6] * 7, 10, 7),  # over half: one each, volume alone says 5
        ([4] * 9, 10, 5),  # over a third: two each, volume alone says 4
        ([7, 7, 7, 4, 4], 10, 4),  # the rooms of 3 are lost to the 4s: Martello and Toth
        ([3] * 9, 11, 3),
        ([26] * 8, 101, 3),  # over a quarter: three each
    ],
)
def test_better_than_volume(sizes: list[int], capacity: int, expected: int) -> None:
    assert bound(sizes, capacity) == expected
