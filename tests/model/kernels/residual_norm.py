"""The residual stream's kernels against plain code in float64, on a CPU in Triton's interpreter or on a GPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.model.helpers import relative

EPS = 1e-3
#: Inputs of each function, by the names of :func:`plain`.
INPUTS = {
    "sum_and_norm": ("x", "y", "bias", "weight", "shift"),
    "keep_and_norm": ("x", "weight", "shift"),
    "sum_with_bias": ("x", "y", "bias"),
}


def plain(function: str, stored: Tensor, x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """In float64. The norm is that of the sum as the kernel rounded it."""
    if function == "keep_and_norm":
        return x, F.layer_norm(x, x.shape[-1:], *others, eps=EPS)
    y, bias, *norm = others
    x = x + y + bias
    if function == "sum_with_bias":
        return (x,)
    return x, F.layer_norm(x + (stored.detach() - x.detach()), x.shape[-1:], *norm, eps=EPS)


def compared(
    function: str, rows: int, width: int, dtype: torch.dtype, frozen: tuple[str, ...] = (), device: str = "cpu"
) -> dict[str, float]:
    """Relative errors of the outputs and of the gradients of all inputs that are not frozen."""
    from vlmdata.model.kernels import residual_norm

    generator = torch.Generator(device).manual_seed(rows * width)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    names = INPUTS[function]
    inputs = [drawn(*((rows, width) if name in "xy" else (width,))) for name in names]
    inputs[0] += 3  # a mean that is not about 0
    wide = [each.double().requires_grad_(name not in frozen) for name, each in zip(names, inputs, strict=True)]
    inputs = [each.requires_grad_(name not in frozen) for name, each in zip(names, inputs, strict=True)]
    settings: Any = () if function == "sum_with_bias" else (EPS,)
    out = getattr(residual_norm, function)(*inputs, *settings)
    ours = out if isinstance(out, tuple) else (out,)
    exact = plain(function, ours[0], *wide)
    assert all(each.dtype == dtype and each.shape == (rows, width) for each in ours)
    # Gradients as a kernel may give them: not contiguous.
    pull = [drawn(width, rows).t() for _ in exact]
    trained = [number for number, name in enumerate(names) if name not in frozen]
    found = torch.autograd.grad(ours, [inputs[number] for number in trained], pull)
    pulled = [(each, grad.double()) for each, grad in zip(exact, pull, strict=True) if each.requires_grad]
    outputs, grads = zip(*pulled, strict=True)
    wanted = torch.autograd.grad(outputs, [wide[number] for number in trained], grads)
    labels = [*("s", "normed")[: len(ours)], *(f"d{names[number]}" for number in trained)]
    assert all(a.dtype == dtype and a.shape == b.shape for a, b in zip(found, wanted, strict=True))
    pairs = zip(labels, (*ours, *found), (*exact, *wanted), strict=True)
    return {name: relative(a.detach(), b.detach()) if rows else float(a.detach().abs().sum()) for name, a, b in pairs}
