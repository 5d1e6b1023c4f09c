"""The kernels of the gated norm equal plain code in float64, in Triton's interpreter on the CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.model.helpers import relative

#: Tokens, heads, width of a head, dtype, and the error that its rounding allows.
CASES = (
    (5, 3, 16, torch.float32, 1e-6),
    (37, 4, 128, torch.float32, 1e-6),  # several programs, the last one in part
    (129, 1, 24, torch.float32, 1e-6),  # no power of two
    (1, 1, 256, torch.float32, 1e-6),
    (300, 2, 64, torch.bfloat16, 6e-3),
)


def plain(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``Qwen3_5RMSNormGated``, in float64."""
    x, gate, weight = x.double(), gate.double(), weight.double()
    return ((x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight) * F.silu(gate)).flatten(-2)


def interpreted() -> None:
    from vlmdata.model.kernels.gated_norm import gated_norm

    generator = torch.Generator().manual_seed(1)
    for tokens, heads, width, dtype, limit in CASES:

        def drawn(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

        x, apart, weight = drawn(1, tokens, heads, width), drawn(1, tokens, heads * width + 8), drawn(width)
        gate = apart[..., : heads * width].unflatten(-1, (heads, width))
        ours, wanted = gated_norm(x, gate, weight, 1e-3), plain(x, gate, weight, 1e-3)
        assert ours.shape == wanted.shape
        assert ours.dtype == dtype
        pull = torch.randn(wanted.shape, generator=generator).to(dtype)
        given = torch.autograd.grad(ours, (x, apart, weight), pull)
        exact = torch.autograd.grad(wanted, (x, apart, weight), pull.double())
        for a, b in zip((ours, *given), (wanted, *exact), strict=True):
            assert relative(a.detach().double(), b.detach().double()) < limit, (tokens, heads, width, dtype)
