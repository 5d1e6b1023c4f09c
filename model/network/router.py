"""The router of a mixture of experts, with a load-balancing loss that does not depend on the layout."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, router_gating_linear
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from model.metrics import MetricSums


@dataclass
class RouterState:
    """What all routers of a model share.

    Attributes:
        weight: Weight of the load-balancing loss of the micro-batch in work: the sum of its targets' weights, since
            the gradient is divided by that sum over the whole step in the end.
        metrics: Where the losses are counted.
    """

    weight: Tensor | float = 1.0
    metrics: MetricSums = field(default_factory=MetricSums)


class BalancedRouter(TopKRouter):
    """``Qwen3_5MoeTopKRouter`` with a load-balancing loss that counts no padding and does not depend on the layout.

    megatron-core's own loss is scaled by the rank's tokens and divided by the sum of tokens, which is off when the
    ranks' padding differs or not every token is a target; and of a pack that is all padding it is not a number.
    """

    state: RouterState

    def gating(self, input: Tensor) -> Tensor:
        """Router logits in float32. megatron-core's would move a CPU weight to CUDA."""
        logits: Tensor = router_gating_linear(input, self.weight, self.bias, torch.float32)
        return logits

    def _apply_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        """Gives the loss its part in the gradient: experts x sum of (share of choices x mean probability).

        Equations 4 to 6 of "Switch Transformers" (Fedus et al. 2021), the shares over all choices of a token as
        megatron-core has it: 1 when tokens are spread evenly (transformers' ``load_balancing_loss_func`` gives as many
        as a token has choices). A rank adds its own tokens' part.

        Args:
            probs: Weights of the experts, which carry the gradient.
            scores_for_aux_loss: float32 (t, experts), probabilities, 0 for padding.
            routing_map: bool (t, experts), what was chosen, nothing for padding.
            with_padding_mask: Ignored.
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
