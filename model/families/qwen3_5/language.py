"""The decoder with multi-token prediction.

Mirrors transformers' ``Qwen3_5TextModel`` and the ``lm_head`` of ``Qwen3_5ForConditionalGeneration``.

Shapes: tokens on this rank t, hidden H.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from vlmdata.model.families.qwen3_5.architecture import Qwen35Architecture
from vlmdata.model.families.qwen3_5.mtp import MultiTokenPredictor
from vlmdata.model.network.decoder import Decoder, HeadInputs
from vlmdata.model.network.provider import Provider
from vlmdata.model.network.targets import AttachLoss


class Qwen35Language(Decoder):
    """``Qwen3_5TextModel`` and its output layer.

    Args:
        config: Configuration of the decoder.
        architecture: Architecture of the whole model.
        block: Specs of this stage's layers.
        provider: The back end.
        mtp_layer: Spec of the multi-token prediction layer; None to leave it out.
        mtp_loss_scale: Weight of its loss.
        options: Further arguments of :class:`~vlmdata.model.network.decoder.Decoder`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        architecture: Qwen35Architecture,
        block: TransformerBlockSubmodules,
        *,
        provider: Provider,
        mtp_layer: ModuleSpec | None,
        mtp_loss_scale: float,
        **options: Any,
    ) -> None:
        super().__init__(config, architecture, block, **options)
        self.mtp_loss_scale = mtp_loss_scale
        self.predictor: MultiTokenPredictor | None = None
        if mtp_layer is not None and self.post_process:
            self.predictor = MultiTokenPredictor(config, provider, mtp_layer, self.pg_collection)

    def _heads(self, hidden_states: Tensor, output_weight: Tensor | None, given: HeadInputs) -> Tensor:
        losses = super()._heads(hidden_states, output_weight, given)
        if self.predictor is None or given.extra is None:
            return losses
        # Of the following tokens: embeddings (t, 1, H), and which are none, bool (1, t), or None; scattered under
        # sequence parallelism.
        following, ignored = given.extra
        angles = self.rotary_pos_emb(given.position_ids, self.mrope_section)
        predicted = self.predictor(hidden_states, following, angles, given.pack, ignored)
        extra, weight = self._losses(predicted, output_weight, given.targets[1])
        self.metrics.add("mtp_loss", extra.detach().sum(), weight)
        attached: Tensor = AttachLoss.apply(losses, extra.sum() * self.mtp_loss_scale)
        return attached
