"""The Triton kernel that splits heads and rotates equals the plain code, in Triton's interpreter on the CPU."""

from __future__ import annotations

import torch

from tests.model.helpers import relative


def interpreted() -> None:
    from model.kernels.rotation import SplitAndRotate
    from model.network.vision_attention import rotate_patches

    for rows, heads, width in ((7, 3, 12), (5, 4, 64), (3, 1, 72)):
        generator = torch.Generator().manual_seed(rows)
        mixed = torch.randn(rows, heads, 3, width, generator=generator).requires_grad_()
        half = 20 * torch.randn(rows, width // 2, generator=generator)
        angles = torch.cat([half, half], -1)
        query, key, value = mixed.unbind(-2)
        plain = (rotate_patches(query, angles.unsqueeze(1)), rotate_patches(key, angles.unsqueeze(1)), value)
        ours = SplitAndRotate.apply(mixed, angles)
        # Gradients as a kernel may give them: not contiguous.
        grads = [torch.randn(width, heads, rows, generator=generator).permute(2, 1, 0) for _ in range(3)]
        (wanted,) = torch.autograd.grad(plain, mixed, grads)
        (given,) = torch.autograd.grad(ours, mixed, grads)
        for a, b in zip((*ours, given), (*plain, wanted), strict=True):
            assert a.shape == b.shape
            assert relative(a.detach(), b.detach()) < 1e-6
