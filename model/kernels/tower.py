"""Runs the vision tower's Triton kernels on tensors without content, so that they can be compiled without a GPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TowerKernels:
    """What the kernels of a vision tower's blocks are compiled for.

    Attributes:
        heads: Heads on a rank.
        head_width: Width of a head.
        width: Width of the residual stream.
        feed_forward: Columns of the feed-forward part on a rank.
    """

    heads: int
    head_width: int
    width: int
    feed_forward: int

    def run(self, device: str) -> None:
        """Runs all, forward and backward.

        Args:
            device: ``meta`` for tensors without content.
        """
        from model.kernels.biased_gelu import run_gelu_with_bias
        from model.kernels.residual_norm import run_residual_norm
        from model.kernels.rotation import run_rotation

        run_rotation(self.heads, self.head_width, device)
        run_residual_norm(self.width, device)
        run_gelu_with_bias(self.feed_forward, device)
