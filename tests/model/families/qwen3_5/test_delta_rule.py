"""The delta rule in chunks equals the recurrence, token by token; the convolution equals torch's on every segment."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.model.helpers import relative

pytest.importorskip("megatron.core")

import itertools
import sys
from types import SimpleNamespace
from typing import Any

from torch import nn

from vlmdata.model.families.qwen3_5.delta_rule import causal_convolution, gated_delta_rule, l2_normalised
from vlmdata.model.families.qwen3_5.gated_delta_net import KernelGatedDeltaNet


def recurrence(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """One segment, straight from the definition: S <- exp(g) S; S <- S + beta k (v - k'S)'; o = q'S / sqrt(k)."""
    tokens, heads, width = query.shape
    state = value.new_zeros(heads, width, value.shape[-1])
    outs = []
    for t in range(tokens):
        state = state * decay[t].exp()[:, None, None]
        read = torch.einsum("hk,hkv->hv", key[t], state)
        update = beta[t][:, None] * (value[t] - read)
        state = state + torch.einsum("hk,hv->hkv", key[t], update)
        outs.append(torch.einsum("hk,hkv->hv", query[t], state) * width**-0.5)
    return torch.stack(outs)


def inputs(tokens: int, seed: int = 0, heads: int = 3, key: int = 8, value: int = 5) -> list[torch.Tensor]:
    """Random arguments of the rule in float64, gradients wanted; decays reach from nearly none to strong."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = (l2_normalised(draw(tokens, heads, key)) for _ in range(2))
    values = [q, k, draw(tokens, heads, value), -draw(tokens, heads).abs() * 2, draw(tokens, heads).sigmoid()]
    return [x.detach().requires_grad_() for x in values]


@settings(max_examples=15)
@given(st.lists(st.integers(0, 150), min_size=1, max_size=4).filter(sum), st.sampled_from([8, 64]), st.integers(0, 9))
@example([33, 65, 150], 8, 0)  # chunks of 32
@example([65, 129], 64, 0)  # chunks of 64
def test_chunks_equal_the_recurrence_in_float64(lengths: list[int], key: int, seed: int) -> None:
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    chunked, plain = inputs(bounds[-1], seed, key=key), inputs(bounds[-1], seed, key=key)
    found = gated_delta_rule(*chunked, bounds)
    wanted = torch.cat([recurrence(*(x[a:b] for x in plain)) for a, b in itertools.pairwise(bounds) if b > a])
    assert found.dtype == torch.float64
    assert relative(found, wanted) < 1e-12
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (found * weights).sum().backward()
    (wanted * weights).sum().backward()
    for mine, theirs in zip(chunked, plain, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("key", [8, 64])
def test_equals_transformers_chunks(key: int) -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    query, key, value, decay, beta = (x.detach().float() for x in inputs(200, heads=4, key=key))
    wanted, _ = torch_chunk_gated_delta_rule(
        query[None], key[None], value[None], g=decay[None], beta=beta[None], use_qk_l2norm_in_kernel=True
    )
    found = gated_delta_rule(l2_normalised(query), l2_normalised(key), value, decay, beta, [0, 200])
    assert relative(found, wanted[0]) < 1e-6


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(sum))
def test_convolution_stays_within_segments(lengths: list[int]) -> None:
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(bounds[-1], 6, generator=generator, dtype=torch.float64)
    taps = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    pieces = [
        F.conv1d(F.pad(x[a:b].T, (3, 0))[None], taps[:, None], groups=6)[0].T
        for a, b in itertools.pairwise(bounds)
        if b > a
    ]
    torch.testing.assert_close(causal_convolution(x, taps, bounds), torch.cat(pieces), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("recompute", "kept"), [(None, True), ("full", True), ("selective", False)])
def test_states_are_kept_unless_recomputation_is_selective(
    monkeypatch: pytest.MonkeyPatch, recompute: str | None, kept: bool
) -> None:
    """The kernels' module needs flash-linear-attention; here it gives back its last argument."""
    rule = SimpleNamespace(apply=lambda *given: given[-1])
    monkeypatch.setitem(sys.modules, "vlmdata.model.kernels.delta_rule", SimpleNamespace(DeltaRule=rule))  # type: ignore[arg-type]
    layer: Any = KernelGatedDeltaNet.__new__(KernelGatedDeltaNet)
    nn.Module.__init__(layer)
    layer.config = SimpleNamespace(recompute_granularity=recompute)
    assert layer._rule(*[None] * 5, SimpleNamespace(cu_seqlens_q_padded=None, delta_chunks=None)) is kept
