"""Division, norm, clipping and update of a step's gradients, with one pass over them for both factors.

Gradients come as sums over all targets of the step. megatron-core would divide them, read them for the norm, and read
and write them again to clip them. Here the norm of the sums is divided, and then gradients are multiplied once, by the
product of both factors.
"""

from __future__ import annotations

import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from torch import Tensor

from model.parallel.separation import Separation


class SumsOptimizer(ChainedOptimizer):
    """AdamW on gradients that are sums.

    Args:
        optimizer: megatron-core's optimizer of this rank.
        largest: Largest norm of the divided gradient; infinity disables clipping.
        sides: Both sides, if the vision tower has ranks of its own. The norm is then that over both.
    """

    def __init__(self, optimizer: MegatronOptimizer, largest: float, sides: Separation | None = None) -> None:
        assert isinstance(optimizer, ChainedOptimizer)
        super().__init__(optimizer.chained_optimizers)
        self._largest, self._sides = largest, sides

    @torch.no_grad()
    def step(self, total: Tensor) -> Tensor:
        """Divides the gradients, clips them and updates the weights.

        With one side and without experts that are spread over ranks, nothing waits for the device.

        Args:
            total: The divisor, the sum of the weights of all targets, float64 () on the device. In a step without
                targets it is 0. All gradients are then 0 and remain 0.

        Returns:
            Norm of the divided gradient before clipping, (1,). It is not finite if a gradient is not.
        """
        overflow = self.prepare_grads()
        assert not overflow  # which only a loss scale, of float16, would look for
        factor = 1.0 / torch.where(total > 0, total, 1.0)
        norm = factor * self.get_grad_norm()
        clipped = factor * (self._largest / (norm + 1e-6)).clamp(max=1.0)
        gradients = [each.grad for each in self.get_parameters() if each.grad is not None]
        if gradients:
            # Wide loads, twice as fast on an H200 as megatron-core's multiplication of a buffer.
            torch._foreach_mul_(gradients, clipped.float().reshape(()))
        self.step_with_ready_grads()
        return norm.reshape(1)

    @torch.no_grad()
    def get_grad_norm(self) -> Tensor | float:
        """Returns the norm of the sums; with two sides over both, as a collective of all ranks."""
        own: Tensor | float = super().get_grad_norm()
        if self._sides is None:
            return own
        # All ranks of a side have its norm, and one of them counts. A sum, unlike a maximum, is not finite if one is.
        speaks = torch.distributed.get_rank() in (0, self._sides.vision)
        square = torch.tensor(
            [float(own or 0.0) ** 2 if speaks else 0.0], dtype=torch.float64, device=torch.cuda.current_device()
        )
        torch.distributed.all_reduce(square)
        return float(square.sqrt().item())
