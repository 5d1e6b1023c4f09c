"""Division, norm, clipping and update of a step's gradients, with one pass over them for both factors.

Gradients come as sums over all targets of the step. megatron-core would divide them in a pass of its own. Here the
norm's kernel divides what it reads, and one pass multiplies gradients by the product of both factors.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from torch import Tensor

from vlmdata.model.parallel.separation import Separation

try:
    from transformer_engine.pytorch import optimizers as _engine
except ImportError:
    _engine = None


#: Larger sums of squares count as infinite on a CPU, too: AdamW keeps squares of gradients in float32.
_LARGEST_SQUARE = torch.finfo(torch.float32).max


class SumsOptimizer(ChainedOptimizer):
    """AdamW on gradients that are sums, clipped to a largest norm of the divided gradient (infinity disables clipping).

    If the vision tower has ranks of its own, both sides are given, and the norm is that over both.
    """

    def __init__(self, optimizer: MegatronOptimizer, largest: float, sides: Separation | None = None) -> None:
        assert isinstance(optimizer, ChainedOptimizer)
        super().__init__(optimizer.chained_optimizers)
        self._largest, self._sides = largest, sides

    @torch.no_grad()
    def step(self, total: Tensor) -> Tensor:
        """Divides the gradients, clips them and updates the weights. The host does not wait for the device.

        The divisor, the sum of the weights of all targets, is float64 () on the device. In a step without targets it is
        0. All gradients are then 0 and remain 0. Returns the norm of the divided gradient before clipping, float64
        (1,). It is not finite if a gradient is not, or if its square exceeds float32.
        """
        overflow = self.prepare_grads()
        assert not overflow  # always False without a loss scaler, which only float16 has
        factor = 1.0 / torch.where(total > 0, total, 1.0)
        norm = self._norm(factor)
        clipped = factor * (self._largest / (norm + 1e-6)).clamp(max=1.0)
        gradients = [each.grad for each in self.get_parameters() if each.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, clipped.float())
        self.step_with_ready_grads()
        return norm.reshape(1)

    def _norm(self, factor: Tensor) -> Tensor:
        """Returns the norm of all gradients times a factor, float64 (). A collective; with two sides, of all ranks."""
        # Experts that are spread over ranks have a group of their own.
        gradients: dict[Any, list[Tensor]] = {}
        for part in self.chained_optimizers:
            gradients.setdefault(part.get_grad_stats_parallel_group(), []).extend(part.get_grads_for_grad_norm())
        total = torch.zeros_like(factor)
        for group, own in gradients.items():
            square = _square(own, factor)
            torch.distributed.all_reduce(square, group=group)
            total += square
        if self._sides is not None:
            # All ranks of a side have its norm, and one of them counts. A sum, unlike a maximum, keeps inf and NaN.
            if torch.distributed.get_rank() not in (0, self._sides.vision):
                total.zero_()
            torch.distributed.all_reduce(total)
        return total.masked_fill(total > _LARGEST_SQUARE, torch.inf).sqrt()


def _square(gradients: list[Tensor], factor: Tensor) -> Tensor:
    """Returns the sum of the squares of float32 gradients, which stay, times a factor, float64 ().

    With loss weights of up to 1e8, squares of the sums themselves may exceed float32.
    """
    if not gradients:
        return torch.zeros_like(factor)
    if _engine is not None and gradients[0].is_cuda:
        noop = torch.zeros(1, dtype=torch.int32, device=factor.device)  # written by the kernel, never read
        kernel, scale = _engine.multi_tensor_unscale_l2norm, factor.float().reshape(1)
        norm: Tensor = _engine.multi_tensor_applier(kernel, noop, [gradients], scale, False)[0]
        return norm.double().square().reshape(())
    norms = torch.stack(torch._foreach_norm(gradients, dtype=torch.float64))
    return (factor * norms).square().sum()
