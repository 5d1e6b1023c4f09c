"""Mixture-of-experts router with a load-balancing loss that does not depend on the layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, router_gating_linear
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from vlmdata.batch import PackedBatch
from vlmdata.model.metrics import MetricSums


@dataclass
class RouterState:
    """State that all routers of a model share.

    Attributes:
        weight: Weight of the load-balancing loss of the current micro-batch: the sum of its target weights. The step
            divides the gradient by that sum over the whole step.
        metrics: Collects the losses.
    """

    weight: Tensor | float = 1.0
    metrics: MetricSums = field(default_factory=MetricSums)

    def weigh(self, batch: PackedBatch, context_group: dist.ProcessGroup) -> None:
        """Takes the sum of a pack's target weights, over context-parallel ranks, as the weight of its loss.

        Raises:
            ValueError: If the batch has no labels, and is trained on.
        """
        if not batch.holds("labels"):
            if not torch.is_grad_enabled():
                return
            raise ValueError(
                f"pack {batch.pack} has no labels, but the load-balancing loss is weighted by the targets: "
                "load the part 'labels' on every pipeline stage, or set moe_aux_loss to 0"
            )
        assert batch.loss_weights is not None
        self.weight = batch.loss_weights.sum()
        if dist.get_world_size(context_group) > 1:
            dist.all_reduce(self.weight, group=context_group)

    def kept_for_backward(self, output: Tensor) -> Tensor:
        """Makes the backward pass of an output use this micro-batch's weight, for layers that are computed again."""
        kept: Tensor = _RestoreWeight.apply(output, self, self.weight)
        return kept


class _RestoreWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, state: RouterState, weight: Tensor | float) -> Tensor:
        ctx.state, ctx.weight = state, weight
        return output.clone() if output.is_leaf else output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.state.weight = ctx.weight
        return gradients[0], None, None


class BalancedRouter(TopKRouter):
    """``Qwen3_5MoeTopKRouter`` with a load-balancing loss that ignores padding and does not depend on the layout.

    megatron-core's own loss is scaled by the rank's tokens and divided by the sum of tokens. This is wrong if the ranks
    have different padding or if some tokens are not targets, and it is NaN for a pack of padding only.
    """

    state: RouterState

    def gating(self, input: Tensor) -> Tensor:
        """Computes router logits in float32. megatron-core's version would move a CPU weight to CUDA."""
        logits: Tensor = router_gating_linear(input, self.weight, self.bias, torch.float32)
        return logits

    def _apply_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        """Adds the gradient of the loss: experts x sum of (share of choices x mean probability).

        Equations 4 to 6 of "Switch Transformers" (Fedus et al. 2021), with the shares taken over all choices of a token
        as in megatron-core: the loss is 1 if tokens are spread evenly (transformers' ``load_balancing_loss_func`` gives
        the number of choices per token). Each rank adds the part of its own tokens.
        """
        coefficient, group = self.get_aux_loss_coeff("aux_loss"), self.tp_cp_group
        if coefficient == 0:
            return probs
        chosen = routing_map.sum(0).float()
        if group.size() > 1:
            dist.all_reduce(chosen, group=group)
        tokens = (chosen.sum() / self.topk).clamp(min=1)
        loss = (scores_for_aux_loss.sum(0) * chosen).sum() * chosen.numel() / (self.topk * tokens.square())
        weight = self.state.weight
        if self.training and torch.is_grad_enabled():
            share = torch.as_tensor(weight, dtype=torch.float32, device=loss.device) / group.size()
            self.state.metrics.add("moe_aux_loss", loss.detach() * weight, share)
        attached: Tensor = MoEAuxLossAutoScaler.apply(probs, loss * coefficient * weight)
        return attached
