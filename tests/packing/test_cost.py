"""The cost model: exact integers, found by name through entry points."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmdata.packing import CostModel, cost, cost_model

COUNTS = st.integers(0, 262_144)


@given(st.integers(1, 262_144), COUNTS, st.integers(0, 65_536), st.integers(0, 2**32))
def test_sample_cost_is_the_exact_formula(tokens: int, targets: int, patches: int, squared: int) -> None:
    model = cost_model("9b")
    flop = model.per_token * tokens + model.per_token_squared * tokens**2 + model.per_target * targets
    flop += model.per_patch * patches + model.per_patch_squared * squared
    columns = [np.array([value], np.int32) for value in (tokens, targets, patches)]
    got = model.sample_costs(*columns, np.array([squared], np.int64))
    assert got.dtype == np.int64
    assert got.tolist() == [flop >> 20]


def test_costs_beyond_int64_are_refused() -> None:
    model = CostModel(0, 1 << 40, 0, 0, 0)
    with pytest.raises(ValueError, match="more than int64 holds"):
        model.sample_costs(np.array([1 << 20]), np.array([0]), np.array([0]), np.array([0]))


def test_bad_models_are_refused() -> None:
    with pytest.raises(ValueError, match=r"per_token is 1\.5"):
        CostModel(1.5, 0, 0, 0, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="per_patch is -1"):
        CostModel(0, 0, 0, -1, 0)


def test_an_unknown_size_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"no cost model for '70b'; known sizes: .*0\.8b, 2b, 4b, 9b, 27b"):
        cost_model("70b")


def test_the_default_is_that_of_the_installed_model_and_needs_no_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = cost_model(cost.DEFAULT_COST)
    monkeypatch.setattr(cost, "entry_points", lambda **_: [])
    cost._named.cache_clear()
    try:
        assert cost_model(cost.DEFAULT_COST) == installed
        with pytest.raises(ValueError, match="known sizes: 4b"):
            cost_model("2b")
    finally:
        cost._named.cache_clear()
