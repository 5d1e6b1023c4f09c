"""Gradients that are sums, divided and clipped in one pass: what megatron-core's two passes give."""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model.training.optimizer.two_passes import compare, divisor, learner, set_gradients, weights
from tests.model.workers import run_in_all

pytest.importorskip("megatron.core")

LAYOUTS = pytest.mark.parametrize(
    ("dtype", "distributed", "fsdp", "moe"),
    [
        (torch.float32, False, False, False),
        (torch.float32, True, False, False),
        (torch.bfloat16, False, False, True),
        (torch.bfloat16, True, False, False),
        (torch.float32, False, True, False),
    ],
)


@LAYOUTS
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_equals_two_passes(
    one_process: None, dtype: torch.dtype, distributed: bool, fsdp: bool, moe: bool, clip: float
) -> None:
    compare(*(learner(clip, dtype, distributed, fsdp, moe) for _ in range(2)), clip)


def of_experts_on_two_ranks() -> list[list[float]]:
    import torch.distributed as dist

    from vlmdata.model.parallel import groups

    groups.initialize(expert=2, backend="gloo")
    found = []
    for dtype, distributed in [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]:
        for clip in (0.0, 1.0):
            ours, theirs = (learner(clip, dtype, distributed, False, True, experts=2) for _ in range(2))
            parts = ours.optimizer.chained_optimizers
            assert [len(part.get_parameters()) > 0 for part in parts] == [True, True]
            found.append(compare(ours, theirs, clip, dist.get_rank()))
    return found


def test_equals_two_passes_with_experts_on_two_ranks() -> None:
    """Experts then have an optimizer and a process group of their own."""
    first, second = run_in_all(of_experts_on_two_ranks, world=2)
    assert first == second


def test_gradients_are_read_twice_and_written_once(one_process: None) -> None:
    made = learner(1.0, torch.bfloat16, True, False, False)
    set_gradients(made, 1.0, 0)
    calls: list[int] = []
    multiply = torch._foreach_mul_
    clip = "megatron.core.optimizer.optimizer.clip_grad_by_total_norm_fp32"
    with (
        patch.object(torch, "_foreach_mul_", lambda own, *rest: (calls.append(len(own)), multiply(own, *rest))),
        patch(clip, side_effect=AssertionError),
    ):
        made.optimizer.step(divisor(7.0))
    assert calls[0] == len(weights(made))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_is_seen(one_process: None, bad: float) -> None:
    made = learner(1.0, torch.float32, False, False, False)
    set_gradients(made, 1.0, 0)
    next(iter(made.model[0].parameters())).main_grad.view(-1)[3] = bad
    assert not made.optimizer.step(divisor(5.0)).isfinite()


@given(st.integers(-24, 24))
@settings(max_examples=10, deadline=None)
def test_a_power_of_two_changes_no_bit(one_process: None, power: int) -> None:
    """Of all weights, and so of gradients and divisor."""
    found = []
    for factor in (1.0, 2.0**power):
        made = learner(1.0, torch.float32, False, False, False)
        set_gradients(made, 3e3 * factor, 1)
        norm = made.optimizer.step(divisor(1e5 * factor))
        found.append([norm, *weights(made)])
    assert all(torch.equal(*each) for each in zip(*found, strict=True))
