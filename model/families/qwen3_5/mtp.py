"""Multi-token prediction: an extra decoder layer that predicts the token after the next.

Mirrors the ``mtp.*`` tensors of published checkpoints. transformers drops them; the reference for their use is vLLM's
``qwen3_5_mtp.py``: ``fc(cat[norm(embedding of the next token), norm(hidden)])``, a full-attention layer, a norm, and
the output layer.

megatron-core's own block looks up embeddings by token id. After an image token it would see the placeholder's embedding
and not the picture's, and it exchanges borders between neighbouring ranks. This module instead takes the embeddings of
the following tokens, merged with the images like the decoder's own and zero after a sample's last token.

Shapes: tokens on this rank t (split over tensor-parallel ranks with sequence parallelism), hidden H.
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

from vlmdata.model.network.provider import Provider
from vlmdata.model.parallel.packed import PackParams


class MultiTokenPredictor(MegatronModule):
    """The ``mtp`` module."""

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
        self, hidden: Tensor, embeddings: Tensor, angles: Tensor, pack: PackParams, padding_mask: Tensor | None
    ) -> Tensor:
        """Predicts the hidden states of the tokens after the next.

        Args:
            hidden: (t, 1, H), the decoder's output after its final norm.
            embeddings: (t, 1, H), embeddings of each following token.
            angles: Rotation angles of the decoder.
            pack: The pack.
            padding_mask: bool (1, t), tokens that router statistics ignore.

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
                packed_seq_params=pack,
                padding_mask=padding_mask,
            )
            normed: Tensor = self.final_layernorm(out)
            return normed

        if self.config.recompute_granularity == "full" and self.training:
            recomputed: Tensor = tensor_parallel.checkpoint(run, False, hidden, embeddings, angles, padding_mask)
            return recomputed
        return run(hidden, embeddings, angles, padding_mask)
