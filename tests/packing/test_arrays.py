"""Array operations of planning: stable orders by value sorts, ranges and sums."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vlmdata.packing.arrays import offsets_of, ranges, stable_order, sums_by


@given(st.lists(st.one_of(st.integers(0, 5), st.integers(0, 2**62)), max_size=50), st.integers(0, 2**62))
def test_equals_a_stable_argsort(keys: list[int], slack: int) -> None:
    values = np.array(keys, np.int64)
    given_values = values.copy()
    most = max(keys, default=0)
    # With keys that leave no room for positions, and with bounds that are not tight.
    for bound in (most, most + slack):
        assert stable_order(values, bound).tolist() == np.argsort(values, kind="stable").tolist()
    assert values.tolist() == given_values.tolist()


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 9)), max_size=20))
def test_ranges_follow_one_another(spans: list[tuple[int, int]]) -> None:
    starts, counts = np.array(spans, np.int64).reshape(-1, 2).T
    found, offsets = ranges(starts, counts), offsets_of(counts)
    assert found.dtype == offsets.dtype == np.int64
    assert found.tolist() == [at for start, count in spans for at in range(start, start + count)]
    pieces = [found[a:b].tolist() for a, b in pairwise(offsets.tolist())]
    assert pieces == [list(range(start, start + count)) for start, count in spans]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2**58)), max_size=20))
def test_sums_are_exact(items: list[tuple[int, int]]) -> None:
    labels, values = np.array(items, np.int64).reshape(-1, 2).T
    assert sums_by(labels, values, 5).tolist() == [sum(v for n, v in items if n == label) for label in range(5)]
