"""Gradients that are sums, divided and clipped in one pass: what megatron-core's two passes give."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model.helpers import small_architecture

pytest.importorskip("megatron.core")

#: Of an update, and of the norm: both round a number or two more or less.
TOLERANCE = 1e-6


def learner(clip: float, dtype: torch.dtype, distributed: bool, fsdp: bool, moe: bool) -> Any:
    """A small model with its optimizer: one of four of megatron-core's, or two of them."""
    from model.families.qwen3_5.build import build_model
    from model.network.settings import ModelSettings
    from model.training.optimizer.learner import build_learner
    from model.training.settings.config_loading import load_config

    torch.manual_seed(5)
    # A rate and an epsilon at which updates show the size of gradients, which AdamW mostly hides.
    given = ["optimizer.overlap=false", "optimizer.lr=1e-2", "optimizer.eps=1e-1", f"optimizer.clip_grad={clip}"]
    given += ["parallel.fsdp=true"] if fsdp else [f"optimizer.distributed={str(distributed).lower()}"]
    precision = "bf16" if dtype == torch.bfloat16 else "fp32"
    model = build_model(small_architecture(moe=moe), ModelSettings(precision=precision))
    # Told that it is on a GPU, as a distributed optimizer is refused elsewhere: only fused Adam restores it.
    return build_learner(model, load_config(None, given), torch.device("cpu" if fsdp else "cuda"), dtype)


def set_gradients(made: Any, scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    (chunk,) = made.model
    chunk.zero_grad_buffer()
    if made.sharded:
        for own in chunk.held:
            own.rows.main_grad = own.parameter.main_grad = scale * torch.randn(own.rows.shape, generator=generator)
    else:
        for parameter in chunk.parameters():
            parameter.main_grad.copy_(scale * torch.randn(parameter.shape, generator=generator))


def in_two_passes(made: Any, total: float, clip: float) -> float:
    """Divides as megatron-core does before a step, and has it make the step."""
    made.model[0].scale_gradients(1.0 / total)
    for part in made.optimizer.chained_optimizers:
        part.config.clip_grad = clip or math.inf
    theirs = super(type(made.optimizer), made.optimizer)
    _, norm, _ = theirs.step()
    return float(norm)


def weights(made: Any) -> list[torch.Tensor]:
    return [
        each.detach().clone().float()
        for part in made.optimizer.chained_optimizers
        for group in part.optimizer.param_groups
        for each in group["params"]
    ]


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
    ours, theirs = (learner(clip, dtype, distributed, fsdp, moe) for _ in range(2))
    before = weights(ours)
    # A gradient that is clipped, if at all; one that is not; and none, of a step without targets.
    for seed, (scale, total) in enumerate([(3e3, 1e5), (1.0, 3e6), (0.0, 0.0)]):
        set_gradients(ours, scale, seed)
        set_gradients(theirs, scale, seed)
        norm = ours.optimizer.step(torch.tensor(total, dtype=torch.float64))
        wanted = in_two_passes(theirs, total or 1.0, clip)
        assert norm.shape == (1,)
        assert float(norm) == pytest.approx(wanted, rel=TOLERANCE)
        assert (wanted > 1) == (seed == 0)
        for own, other in zip(weights(ours), weights(theirs), strict=True):
            torch.testing.assert_close(own, other, rtol=TOLERANCE, atol=TOLERANCE)
    assert sum(not torch.equal(*each) for each in zip(weights(ours), before, strict=True)) > 0.9 * len(before)


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
        made.optimizer.step(torch.tensor(7.0, dtype=torch.float64))
    assert calls[0] == len(weights(made))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_is_seen(one_process: None, bad: float) -> None:
    made = learner(1.0, torch.float32, False, False, False)
    set_gradients(made, 1.0, 0)
    next(iter(made.model[0].parameters())).main_grad.view(-1)[3] = bad
    assert not made.optimizer.step(torch.tensor(5.0, dtype=torch.float64)).isfinite()


@given(st.integers(-24, 24))
@settings(max_examples=10, deadline=None)
def test_a_power_of_two_changes_no_bit(one_process: None, power: int) -> None:
    """Of all weights, and so of gradients and divisor."""
    found = []
    for factor in (1.0, 2.0**power):
        made = learner(1.0, torch.float32, False, False, False)
        set_gradients(made, 3e3 * factor, 1)
        norm = made.optimizer.step(torch.tensor(1e5 * factor, dtype=torch.float64))
        found.append([norm, *weights(made)])
    assert all(torch.equal(*each) for each in zip(*found, strict=True))
