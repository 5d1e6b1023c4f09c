"""The kernels before attention and the same in plain torch, for tests on CPU and checks on CUDA."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.model.helpers import relative
from vlmdata.model.kernels.attention_inputs import AttentionHeads, AttentionInputs


def drawn(
    tokens: int, heads: AttentionHeads, rotated: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, ...]:
    """Projection, angles in float32, and the weights of both norms."""
    generator = torch.Generator().manual_seed(1)
    angles = (torch.rand(tokens, rotated // 2, generator=generator) * 50).repeat(1, 2).to(device)
    shapes = (tokens, heads.columns), (heads.width,), (heads.width,)
    mixed, *weights = (
        torch.randn(each, generator=generator).to(device=device, dtype=dtype).requires_grad_() for each in shapes
    )
    return mixed, angles, *weights


def plain(mixed: Tensor, angles: Tensor, weights: Sequence[Tensor], heads: AttentionHeads) -> list[Tensor]:
    """Splits, normalises and rotates float64 tensors with torch's own functions."""
    queries = [heads.queries * heads.width] * (1 + heads.gated)
    parts = mixed.view(len(mixed), heads.groups, -1).split([*queries, heads.width, heads.width], -1)
    query, *gate, key, value = (each.reshape(len(mixed), -1, heads.width) for each in parts)
    turned = []
    for x, weight in zip((query, key), weights, strict=True):
        scale = weight + heads.zero_centered
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + heads.eps) * scale
        rotated, rest = x[..., : angles.shape[-1]], x[..., angles.shape[-1] :]
        first, second = rotated.chunk(2, -1)
        cos, sin = angles.double()[:, None].cos(), angles.double()[:, None].sin()
        turned.append(torch.cat([rotated * cos + torch.cat([-second, first], -1) * sin, rest], -1))
    return [*turned, value, *gate]


def compared(
    tokens: int, heads: AttentionHeads, rotated: int, dtype: torch.dtype, device: str = "cpu"
) -> dict[str, float]:
    """The errors of all results and gradients against float64, relative to what each is."""
    mixed, angles, *weights = drawn(tokens, heads, rotated, dtype, device)
    inputs = [mixed, *weights]
    found = AttentionInputs.apply(mixed, angles, *weights, heads)[: 3 + heads.gated]
    exact = [each.detach().double().requires_grad_() for each in inputs]
    wanted = plain(exact[0], angles, exact[1:], heads)
    generator = torch.Generator().manual_seed(2)
    pull = [torch.randn(each.shape, generator=generator).to(device=device, dtype=dtype) for each in wanted]
    given = torch.autograd.grad(found, inputs, pull)
    demanded = torch.autograd.grad(wanted, exact, [each.double() for each in pull])
    names = ["query", "key", "value", *["gate"] * heads.gated, "d projection", "d query norm", "d key norm"]
    errors = {}
    for name, mine, theirs in zip(names, (*found, *given), (*wanted, *demanded), strict=True):
        assert mine.shape == theirs.shape, name
        errors[name] = relative(mine.detach().double(), theirs.detach().double())
    return errors
