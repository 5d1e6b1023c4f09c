"""Triton kernels in Triton's interpreter on the CPU: what each function checks stands in its module."""

from __future__ import annotations

import importlib.util

import pytest

from tests.model.kernels.interpreter import run_interpreted

pytest.importorskip("megatron.core")

CALLS = [
    f"tests.model.kernels.interpreted_{call}"
    for call in (
        "delta_inputs:interpreted",
        "delta_inputs:in_the_model",
        "attention_inputs:interpreted",
        "attention_inputs:in_the_layer",
        "gating:interpreted",
        "gating:in_the_layers",
        "gated_norm:interpreted",
        "biased_gelu:interpreted",
        "biased_gelu:with_frozen_inputs",
        "biased_gelu:of_extreme_values",
        "rotation:interpreted",
        "rotation:with_frozen_inputs",
        "residual_norm:interpreted",
        "residual_norm:with_frozen_inputs",
        "residual_norm:in_the_stream",
        "residual_norm:in_the_tower",
        "expert_gradients:interpreted",
        "expert_gradients:in_the_layer",
    )
]


@pytest.fixture(scope="module")
def errors(request: pytest.FixtureRequest) -> dict[str, str | None]:
    """What went wrong in those that are selected: one process imports for all, which takes 5 s of CPU time."""
    here = [item for item in request.session.items if item.path == request.path]
    return run_interpreted([item.callspec.params["call"] for item in here])  # type: ignore[attr-defined]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton here")
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.partition("interpreted_")[2])
def test_they_equal_the_plain_code(errors: dict[str, str | None], call: str) -> None:
    assert errors[call] is None, errors[call]
