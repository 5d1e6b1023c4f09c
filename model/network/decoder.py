"""The decoder with its output layer. Computes token losses or logits.

Mirrors transformers' ``Qwen3VLTextModel`` and the ``lm_head`` of ``Qwen3VLForConditionalGeneration``. Families with
more heads extend it. The layer stack, vocabulary-parallel embedding, output layer and cross-entropy are megatron-core's
``GPTModel``.

Shapes: tokens on this rank t, hidden H, vocabulary on this rank V.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from vlmdata.batch import IGNORE_INDEX
from vlmdata.model.architecture import Architecture
from vlmdata.model.metrics import MetricSums
from vlmdata.model.network.attention import InterleavedMRoPE
from vlmdata.model.network.targets import TargetRows
from vlmdata.model.parallel.packed import PackParams


@dataclass(frozen=True)
class HeadInputs:
    """What the heads of the last stage need in addition to hidden states.

    Attributes:
        position_ids: int64 (3, 1, t), of the tokens on this rank.
        pack: The pack.
        targets: Of each head; empty for logits.
        extra: A family's own inputs.
    """

    position_ids: Tensor
    pack: PackParams
    targets: tuple[TargetRows, ...]
    extra: Any


class Decoder(GPTModel):
    """A decoder with rotary positions in three axes, and its output layer.

    Args:
        config: Configuration of the decoder.
        architecture: Architecture of the whole model.
        block: Specs of this stage's layers.
        vocab_rows: Rows of the embedding table, padded for tensor parallelism.
        metrics: Collects additional losses.
        options: ``pre_process``, ``post_process``, ``pg_collection`` of ``GPTModel``.
    """

    def __init__(
        self,
        config: TransformerConfig,
        architecture: Architecture,
        block: TransformerBlockSubmodules,
        *,
        vocab_rows: int,
        metrics: MetricSums,
        **options: Any,
    ) -> None:
        language = architecture.language
        # Built without positions, because megatron-core's three-axis rotary class is not interleaved. The branch that
        # calls it is right.
        super().__init__(
            config,
            block,
            vocab_size=vocab_rows,
            max_sequence_length=language.max_position_embeddings,
            position_embedding_type="none",
            parallel_output=True,
            share_embeddings_and_output_weights=architecture.tie_embeddings,
            scatter_embedding_sequence_parallel=False,
            **options,
        )
        self.position_embedding_type = "mrope"
        self.mrope_section = list(language.mrope_section)
        self.rotary_pos_emb = InterleavedMRoPE(language.rotary_dim, language.rope_theta)
        self.true_vocab, self.metrics = language.vocab_size, metrics
        if self.post_process:
            # Its input is a selection from all tokens, equal on all ranks, and not a part of the sequence.
            self.output_layer.sequence_parallel = False
            self.output_layer.allreduce_dgrad = self.pg_collection.tp.size() > 1

    def decode(
        self,
        embeddings: Tensor | None,
        position_ids: Tensor,
        pack: PackParams,
        padding_mask: Tensor | None,
        targets: tuple[TargetRows, ...],
        *,
        features: Tensor | None = None,
        extra: Any = None,
    ) -> Tensor:
        """Runs this stage's layers and, on the last stage, the heads.

        Args:
            embeddings: (t, 1, H) merged inputs, scattered under sequence parallelism; None after the first stage,
                where ``set_input_tensor`` supplies them.
            position_ids: int64 (3, 1, t), of the tokens on this rank.
            pack: The pack.
            padding_mask: bool (1, t), scattered under sequence parallelism.
            targets: Of each head; empty for logits.
            features: Image features for this stage's first layers (:mod:`vlmdata.model.network.deepstack`); None
            without any.
            extra: Inputs of a family's own heads.

        Returns:
            Before the last stage: hidden states (t, 1, H). On the last stage: float32 losses (1, t) times their
            weights, 0 off target, or logits (1, t, V) without targets.
        """
        output: Tensor = self(
            input_ids=None,
            position_ids=position_ids,
            attention_mask=None,
            decoder_input=embeddings,
            packed_seq_params=pack,
            padding_mask=padding_mask,
            # The input that megatron-core hands from layer to layer beside the hidden states, also when recomputing.
            extra_block_kwargs=None if features is None else {"context": features},
            output_processor=self._process_output,
            output_processor_context=HeadInputs(position_ids, pack, targets, extra),
        )
        return output

    def _process_output(
        self, hidden_states: Tensor, output_weight: Tensor | None, context: HeadInputs, **unused: Any
    ) -> Tensor:
        if not context.targets:
            return self._logits(self._all_tokens(hidden_states), output_weight).transpose(0, 1).contiguous()
        return self._heads(hidden_states, output_weight, context)

    def _heads(self, hidden_states: Tensor, output_weight: Tensor | None, given: HeadInputs) -> Tensor:
        """Returns weighted losses, float32 (1, t). Families with more heads override it."""
        return self._losses(hidden_states, output_weight, given.targets[0])[0]

    def _logits(self, hidden_states: Tensor, output_weight: Tensor | None) -> Tensor:
        logits: Tensor = self.output_layer(hidden_states, weight=output_weight)[0]
        # Rows that only pad the table for tensor parallelism are not tokens.
        width = logits.shape[-1]
        padding = (self.pg_collection.tp.rank() + 1) * width - self.true_vocab
        if padding > 0:
            filler = torch.arange(width, device=logits.device) >= width - padding
            logits = logits.masked_fill(filler, torch.finfo(logits.dtype).min)
        return logits

    def _losses(self, hidden: Tensor, output_weight: Tensor | None, targets: TargetRows) -> tuple[Tensor, Tensor]:
        """Returns weighted cross-entropy per token, float32 (1, t), 0 off target, and the sum of the weights."""
        hidden = self._all_tokens(hidden)
        places, labels, weights = targets.get()
        on_target = labels != IGNORE_INDEX
        logits = self._logits(hidden.index_select(0, places), output_weight)
        found = self.compute_language_model_loss(labels.clamp(min=0).unsqueeze(0), logits)[0]
        losses = hidden.new_zeros(hidden.shape[0], dtype=torch.float32)
        # Padding rows add nothing, wherever they point.
        losses = losses.index_add(0, places, torch.where(on_target, found.float() * weights, 0.0))
        return losses.unsqueeze(0), weights.sum()

    def _all_tokens(self, hidden: Tensor) -> Tensor:
        """Gathers the hidden states of all tokens, which sequence parallelism spreads over tensor-parallel ranks."""
        if not self.config.sequence_parallel:
            return hidden
        # The output layer sums the gradient over the ranks, so each rank takes its part.
        gathered: Tensor = gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp
        )
        return gathered
