"""Multi-token prediction: one more decoder layer that guesses the token after the next.

Mirrors the ``mtp.*`` tensors of published checkpoints. transformers drops them; the reference for their use is vLLM's
``qwen3_5_mtp.py``: ``fc(cat[norm(embedding of the next token), norm(hidden)])``, a full-attention layer, a norm, and
the output layer.

megatron-core's own block looks embeddings up by token id, so that after an image token it would see the placeholder's
embedding and not the picture's, and it exchanges borders rank by rank. Ours is given the embeddings of the following
tokens, merged with the images as the decoder's own, zero after a sample's last token.

Shapes: tokens of this rank t (over tensor-parallel ranks with sequence parallelism), hidden H.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region, scatter_to_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from model.network.provider import Provider
from model.parallel.packed import PackedLayout


class MultiTokenPredictor(MegatronModule):
    """The ``mtp`` module.

    Args:
        config: Of the decoder.
        provider: The back end.
        layer: Spec of its decoder layer.
        pg_collection: Process groups.
    """

    def __init__(
        self,
        config: TransformerConfig,
        provider: Provider,
        layer: ModuleSpec,
        pg_collection: Any,
    ) -> None:
        super().__init__(config=config)
        self.tp_group = pg_collection.tp
        norm = provider.layer_norm(rms_norm=True)
        sizes = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.enorm, self.hnorm, self.final_layernorm = norm(**sizes), norm(**sizes), norm(**sizes)
        self.eh_proj = build_module(
            provider.column_parallel_linear(),
            2 * config.hidden_size,
            config.hidden_size,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name="mtp_eh_proj",
            tp_group=self.tp_group,
        )
        self.layer = build_module(
            layer,
            config=config,
            layer_number=1,
            is_mtp_layer=True,
            pg_collection=pg_collection,
        )

    def forward(
        self, hidden: Tensor, embeddings: Tensor, angles: Tensor, layout: PackedLayout, padding_mask: Tensor | None
    ) -> Tensor:
        """Predicts.

        Args:
            hidden: (t, 1, H), the decoder's output behind its final norm.
            embeddings: (t, 1, H), of the token that follows each.
            angles: Rotation angles, as the decoder's.
            layout: The pack.
            padding_mask: bool (1, t), tokens that the router's statistics leave out.

        Returns:
            (t, 1, H), for the output layer.
        """

        def run(hidden: Tensor, embeddings: Tensor, angles: Tensor, padding_mask: Tensor | None) -> Tensor:
            joined, _ = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(hidden)], -1))
            joined = gather_from_tensor_model_parallel_region(joined, group=self.tp_group)
            if self.config.sequence_parallel:
                joined = scatter_to_sequence_parallel_region(joined, group=self.tp_group)
            out, _ = self.layer(
                hidden_states=joined,
                attention_mask=None,
                rotary_pos_emb=angles,
                packed_seq_params=layout,
                padding_mask=padding_mask,
            )
            normed: Tensor = self.final_layernorm(out)
            return normed

        if self.config.recompute_granularity == "full" and self.training:
            recomputed: Tensor = tensor_parallel.checkpoint(run, False, hidden, embeddings, angles, padding_mask)
            return recomputed
        return run(hidden, embeddings, angles, padding_mask)
