"""Stable orders by value sorts."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vlmdata.packing.bins.ordering import stable_order


@given(st.lists(st.one_of(st.integers(0, 5), st.integers(0, 2**62)), max_size=50), st.integers(0, 2**62))
def test_equals_a_stable_argsort(keys: list[int], slack: int) -> None:
    values = np.array(keys, np.int64)
    given_values = values.copy()
    most = max(keys, default=0)
    # With keys that leave no room for positions, and with bounds that are not tight.
    for bound in (most, most + slack):
        assert stable_order(values, bound).tolist() == np.argsort(values, kind="stable").tolist()
    assert values.tolist() == given_values.tolist()
