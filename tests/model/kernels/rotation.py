"""The kernel that splits and rotates against torch in float64, on a CPU in Triton's interpreter or on a GPU."""

from __future__ import annotations

import torch

from tests.model.helpers import relative


def compared(
    rows: int, heads: int, width: int, dtype: torch.dtype, frozen: tuple[str, ...] = (), device: str = "cpu"
) -> dict[str, float]:
    """Relative errors of the outputs and of the gradients of inputs that are not frozen; without rows, their sums."""
    from vlmdata.model.kernels.rotation import SplitAndRotate
    from vlmdata.model.network.patch_geometry import PatchGeometry

    generator = torch.Generator(device).manual_seed(rows * heads * width)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    geometry = PatchGeometry()
    geometry.angles = (20 * drawn(rows, 1, width // 2)).repeat(1, 1, 2)
    # Tensors as a kernel may give them: not contiguous.
    inputs = {"mixed": drawn(width, heads, rows, 3).permute(2, 1, 3, 0), "bias": drawn(3 * heads * width)}
    inputs = {name: each.to(dtype) for name, each in inputs.items()}
    pull = [drawn(width, heads, rows).permute(2, 1, 0).to(dtype) for _ in range(3)]
    wide = {name: each.double().requires_grad_(name not in frozen) for name, each in inputs.items()}
    inputs = {name: each.requires_grad_(name not in frozen) for name, each in inputs.items()}
    trained = [name for name in inputs if name not in frozen]
    ours = SplitAndRotate.apply(*inputs.values(), geometry.turns)
    query, key, value = (wide["mixed"] + wide["bias"].view(heads, 3, width)).unbind(-2)
    exact = (_rotated(query, geometry.angles.double()), _rotated(key, geometry.angles.double()), value)
    found = torch.autograd.grad(ours, [inputs[name] for name in trained], pull)
    wanted = torch.autograd.grad(exact, [wide[name] for name in trained], [each.double() for each in pull])
    labels = ["query", "key", "value", *(f"d{name}" for name in trained)]
    errors = {}
    for name, a, b in zip(labels, (*ours, *found), (*exact, *wanted), strict=True):
        assert (a.dtype, a.shape) == (dtype, b.shape)
        errors[name] = relative(a.detach(), b.detach()) if rows else float(a.detach().abs().sum())
    return errors


def _rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()
