"""The decoder with its heads: token losses, or logits.

Mirrors transformers' ``Qwen3_5TextModel`` and the ``lm_head`` of ``Qwen3_5ForConditionalGeneration``.
The stack of layers, the vocabulary-parallel embedding, output layer and cross-entropy are megatron-core's ``GPTModel``.

Shapes: tokens of this rank t, hidden H, vocabulary of this rank V.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from model.families.qwen3_5.architecture import Qwen35Architecture
from model.families.qwen3_5.mtp import MultiTokenPredictor
from model.metrics import MetricSums
from model.network.attention import InterleavedMRoPE
from model.network.provider import Provider
from model.network.targets import AttachLoss, TargetRows, Targets
from model.parallel.packed import PackedLayout
from vlmdata.batch import IGNORE_INDEX


@dataclass(frozen=True)
class Following:
    """What multi-token prediction needs of the tokens that follow.

    Attributes:
        embeddings: (t, 1, H), of the following tokens, scattered under sequence parallelism.
        padding_mask: bool (1, t), tokens that nothing real follows; scattered likewise.
    """

    embeddings: Tensor
    padding_mask: Tensor | None


class Qwen35Language(GPTModel):
    """``Qwen3_5TextModel`` and output layer.

    Args:
        config: Of the decoder.
        architecture: Of the whole model.
        block: Specs of this stage's layers.
        provider: The back end.
        mtp_layer: Spec of the multi-token prediction layer; None to leave it out.
        mtp_loss_scale: Weight of its loss.
        vocab_rows: Rows of the embedding table, padded for tensor parallelism.
        metrics: Where losses beside the main one are counted.
        options: ``pre_process``, ``post_process``, ``pg_collection`` of ``GPTModel``.
    """

    def __init__(
        self,
        config: TransformerConfig,
        architecture: Qwen35Architecture,
        block: TransformerBlockSubmodules,
        provider: Provider,
        *,
        mtp_layer: ModuleSpec | None,
        mtp_loss_scale: float,
        vocab_rows: int,
        metrics: MetricSums,
        **options: Any,
    ) -> None:
        language = architecture.language
        # Built without positions: megatron-core's rotary class for three axes is not interleaved. The branch that calls
        # it is right.
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
        self.true_vocab, self.metrics, self.mtp_loss_scale = language.vocab_size, metrics, mtp_loss_scale
        self.predictor: MultiTokenPredictor | None = None
        if self.post_process:
            # It is given chosen rows of all tokens, the same on all ranks, not a part of the sequence.
            self.output_layer.sequence_parallel = False
            self.output_layer.allreduce_dgrad = self.pg_collection.tp.size() > 1
        if mtp_layer is not None and self.post_process:
            self.predictor = MultiTokenPredictor(config, provider, mtp_layer, self.pg_collection)

    def decode(
        self,
        embeddings: Tensor | None,
        position_ids: Tensor,
        layout: PackedLayout,
        padding_mask: Tensor | None,
        targets: Targets | None,
        following: Following | None,
    ) -> Tensor:
        """Runs this stage's layers, and the heads on the last stage.

        Args:
            embeddings: (t, 1, H) merged inputs, scattered under sequence parallelism; None past the first stage,
                where ``set_input_tensor`` gave them.
            position_ids: int64 (3, 1, t), of the tokens held here.
            layout: The pack.
            padding_mask: bool (1, t), scattered under sequence parallelism.
            targets: None for logits.
            following: None without multi-token prediction or targets.

        Returns:
            Hidden states (t, 1, H) before the last stage; there float32 losses (1, t) times their weights, 0 off
            target; or logits (1, t, V) without targets.
        """
        output: Tensor = self(
            input_ids=None,
            position_ids=position_ids,
            attention_mask=None,
            decoder_input=embeddings,
            packed_seq_params=layout,
            padding_mask=padding_mask,
            output_processor=self._heads,
            output_processor_context=(position_ids, layout, targets, following),
        )
        return output

    def _heads(self, hidden_states: Tensor, output_weight: Tensor | None, context: Any, **unused: Any) -> Tensor:
        position_ids, layout, targets, following = context
        if targets is None:
            return self._logits(self._all_tokens(hidden_states), output_weight).transpose(0, 1).contiguous()
        losses, _ = self._losses(hidden_states, output_weight, targets.next)
        if self.predictor is None or following is None or targets.after_next is None:
            return losses
        angles = self.rotary_pos_emb(position_ids, self.mrope_section)
        predicted = self.predictor(hidden_states, following.embeddings, angles, layout, following.padding_mask)
        extra, weight = self._losses(predicted, output_weight, targets.after_next)
        self.metrics.add("mtp_loss", extra.detach().sum(), weight)
        attached: Tensor = AttachLoss.apply(losses, extra.sum() * self.mtp_loss_scale)
        return attached

    def _logits(self, hidden_states: Tensor, output_weight: Tensor | None) -> Tensor:
        logits: Tensor = self.output_layer(hidden_states, weight=output_weight)[0]
        # Rows that only fill up the table for tensor parallelism are no tokens.
        width = logits.shape[-1]
        padding = (self.pg_collection.tp.rank() + 1) * width - self.true_vocab
        if padding > 0:
            filler = torch.arange(width, device=logits.device) >= width - padding
            logits = logits.masked_fill(filler, torch.finfo(logits.dtype).min)
        return logits

    def _losses(self, hidden: Tensor, output_weight: Tensor | None, targets: TargetRows) -> tuple[Tensor, Tensor]:
        """Weighted cross-entropy per token, float32 (1, t), 0 off target; and the sum of the weights."""
        hidden = self._all_tokens(hidden)
        places, labels, weights = targets.get()
        on_target = labels != IGNORE_INDEX
        logits = self._logits(hidden.index_select(0, places), output_weight)
        found = self.compute_language_model_loss(labels.clamp(min=0).unsqueeze(0), logits)[0]
        losses = hidden.new_zeros(hidden.shape[0], dtype=torch.float32)
        # Rows that fill up add nothing, wherever they point.
        losses = losses.index_add(0, places, torch.where(on_target, found.float() * weights, 0.0))
        return losses.unsqueeze(0), weights.sum()

    def _all_tokens(self, hidden: Tensor) -> Tensor:
        """Hidden states of all tokens of the tensor-parallel ranks, which share them under sequence parallelism."""
        if not self.config.sequence_parallel:
            return hidden
        # The output layer sums the gradient over the ranks, so each takes its part of it.
        gathered: Tensor = gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp
        )
        return gathered
