"""Runs the vision tower's Triton kernels on tensors without content, so that they can be compiled without a GPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TowerKernels:
    """What the kernels of a vision tower's blocks are compiled for."""

    heads: int  # heads on a rank
    head_width: int  # width of a head
    width: int  # width of the residual stream
    feed_forward: int  # columns of the feed-forward part on a rank

    def run(self, device: str) -> None:
        """Runs all, forward and backward, on one row. Device ``meta`` gives tensors without content."""
        import torch

        from model.kernels.biased_gelu import gelu_with_bias
        from model.kernels.residual_norm import keep_and_norm, sum_and_norm, sum_with_bias
        from model.kernels.rotation import SplitAndRotate

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device=device, requires_grad=True)

        mixed, bias = empty(1, self.heads, 3, self.head_width), empty(3 * self.heads * self.head_width)
        made = [*SplitAndRotate.apply(mixed, bias, torch.empty(1, self.head_width, device=device))]
        x, y = empty(1, self.width), empty(1, self.width)
        bias, weight, shift = (empty(self.width) for _ in range(3))
        made += [*keep_and_norm(x, weight, shift, 1e-6), *sum_and_norm(x, y, bias, weight, shift, 1e-6)]
        made += [sum_with_bias(x, y, bias), gelu_with_bias(empty(1, self.feed_forward), empty(self.feed_forward))]
        torch.autograd.backward(made, [torch.ones_like(each) for each in made])
