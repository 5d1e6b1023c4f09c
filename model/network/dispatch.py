"""Dispatches tokens to experts on a rank that holds all of them. The host does not wait for token counts."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor


class ExpertsLayer(MoELayer):
    """megatron-core's layer of experts. A rank that holds all experts sends no tokens, and sorts them only once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        dispatcher: Any = self.token_dispatcher
        assert type(dispatcher) is MoEAlltoAllTokenDispatcher
        config = self.config  # with these, the number of rows would depend on the tokens
        assert config.moe_expert_capacity_factor is None
        assert not config.moe_router_padding_for_quantization
        if dispatcher.ep_size == dispatcher.tp_size == 1:
            dispatcher.__class__ = _StayingDispatcher


class _StayingDispatcher(MoEAlltoAllTokenDispatcher):
    """Dispatches within one rank. Each token has one row per expert that it is sent to, so all shapes are known."""

    tokens_per_expert: Any

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Tensor | None = None) -> Tensor | None:
        """Leaves the token counts on the device. megatron-core copies them to the host and waits."""
        return tokens_per_expert

    def dispatch_postprocess(self, global_input_tokens: Tensor, global_probs: Tensor) -> tuple[Tensor, Any, Tensor]:
        """Returns its inputs and the token counts. Rows of one rank are already in the order of its experts."""
        counts, self.tokens_per_expert = self.tokens_per_expert, None
        return global_input_tokens, counts, global_probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Returns its input: rows of one rank are already in order."""
        return hidden_states
