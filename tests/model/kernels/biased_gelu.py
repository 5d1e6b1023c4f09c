"""The kernels of GELU with a bias against torch in float64, on a CPU in Triton's interpreter or on a GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.model.helpers import relative


def compared(
    rows: int, width: int, dtype: torch.dtype, frozen: tuple[str, ...] = (), device: str = "cpu"
) -> dict[str, float]:
    """Relative errors of the output and of the gradients of inputs that are not frozen; without rows, their sums."""
    from vlmdata.model.kernels.biased_gelu import gelu_with_bias

    generator = torch.Generator(device).manual_seed(rows * width)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    # Tensors as a kernel may give them: not contiguous.
    inputs = {"product": (3 * drawn(width, rows).t()).to(dtype), "bias": drawn(width).to(dtype)}
    pull = drawn(width, rows).t().to(dtype)
    wide = {name: each.double().requires_grad_(name not in frozen) for name, each in inputs.items()}
    inputs = {name: each.requires_grad_(name not in frozen) for name, each in inputs.items()}
    trained = [name for name in inputs if name not in frozen]
    out = gelu_with_bias(**inputs)
    exact = F.gelu(wide["product"] + wide["bias"], approximate="tanh")
    found = torch.autograd.grad(out, [inputs[name] for name in trained], pull)
    wanted = torch.autograd.grad(exact, [wide[name] for name in trained], pull.double())
    pairs = zip(["out", *(f"d{name}" for name in trained)], (out, *found), (exact, *wanted), strict=True)
    errors = {}
    for name, a, b in pairs:
        assert (a.dtype, a.shape) == (dtype, b.shape)
        errors[name] = relative(a.detach(), b.detach()) if rows else float(a.detach().abs().sum())
    return errors
