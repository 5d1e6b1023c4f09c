"""The kernels of a decoder's residual stream against plain code in float64, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.model.helpers import relative

EPS = 1e-3
#: Inputs of each function, by the names of :func:`plain`.
INPUTS = {"sum_and_rms_norm": ("x", "y", "weight"), "keep_and_rms_norm": ("x", "weight")}


def plain(zero_centered: bool, stored: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """In float64. The norm is that of the sum as the kernel rounded it."""
    *added, weight = inputs
    out = added[0] if len(added) == 1 else added[0] + added[1]
    rounded = out + (stored.detach() - out.detach())
    return out, F.rms_norm(rounded, rounded.shape[-1:], weight + zero_centered, eps=EPS)


def compared(
    function: str,
    shape: tuple[int, ...],
    zero_centered: bool,
    dtype: torch.dtype,
    frozen: tuple[str, ...] = (),
    device: str = "cpu",
) -> dict[str, float]:
    """Relative errors of the outputs and of the gradients of all inputs that are not frozen."""
    from model.kernels import residual_rms_norm

    generator = torch.Generator(device).manual_seed(sum(shape))
    width = shape[-1]

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    names = INPUTS[function]
    inputs = [drawn(*(shape if name in "xy" else (width,))) for name in names]
    wide = [each.double().requires_grad_(name not in frozen) for name, each in zip(names, inputs, strict=True)]
    inputs = [each.requires_grad_(name not in frozen) for name, each in zip(names, inputs, strict=True)]
    ours = getattr(residual_rms_norm, function)(*inputs, EPS, zero_centered)
    exact = plain(zero_centered, ours[0], *wide)
    assert all(each.dtype == dtype and each.shape == shape for each in ours)
    # Gradients as a kernel may give them: not contiguous.
    pull = [drawn(*shape[::-1]).permute(*reversed(range(len(shape)))) for _ in exact]
    trained = [number for number, name in enumerate(names) if name not in frozen]
    found = torch.autograd.grad(ours, [inputs[number] for number in trained], pull)
    pulled = [(each, grad.double()) for each, grad in zip(exact, pull, strict=True) if each.requires_grad]
    outputs, grads = zip(*pulled, strict=True)
    wanted = torch.autograd.grad(outputs, [wide[number] for number in trained], grads)
    labels = ["s", "normed", *(f"d{names[number]}" for number in trained)]
    assert all(a.dtype == dtype and a.shape == b.shape for a, b in zip(found, wanted, strict=True))
    pairs = zip(labels, (*ours, *found), (*exact, *wanted), strict=True)
    empty = not ours[0].numel()
    return {name: float(a.detach().abs().sum()) if empty else relative(a.detach(), b.detach()) for name, a, b in pairs}
