"""NeMo Automodel's Qwen3.5-VL and Qwen3-VL as a way of `adapter_peer.py`: its model, packs and loss, not its recipe.

Needs nemo-automodel and cut-cross-entropy. 0.7.0 runs with transformers 5.17, although it asks for 5.18. Its recipe
makes the same calls: a pack in the layout of its "neat packing", the final hidden states, and a linear layer with
cross-entropy over the targets alone.

- Qwen3.5-VL: its own decoder, with Transformer Engine's attention and linear layers, which it chooses by itself on a
  GPU, flash-linear-attention, and causal-conv1d if installed. The tower is transformers'.
- Qwen3-VL: transformers' layers, with FlashAttention over the samples of a pack.
"""

from __future__ import annotations

from typing import Any

import torch
from train_peer import CLIP, DEVICE, DTYPE, PeerStep, config_of

from vlmdata import PackedBatch
from vlmdata.model.architecture import Architecture

Inputs = dict[str, Any]


def nemo_model(architecture: Architecture) -> torch.nn.Module:
    """NeMo Automodel's model of an architecture, with random weights, without multi-token prediction."""
    from nemo_automodel.components.models.qwen3_5.model import Qwen3_5ForConditionalGeneration
    from nemo_automodel.components.models.qwen3_vl.model import Qwen3VLForConditionalGeneration

    config = config_of(architecture)
    config.torch_dtype = config.text_config.torch_dtype = DTYPE
    usual = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)
    try:
        with torch.device(DEVICE):
            if config.model_type == "qwen3_5":
                model = Qwen3_5ForConditionalGeneration(config, num_nextn_predict_layers=0)
                model.initialize_weights(DEVICE, DTYPE)
                # It draws embeddings, which are tied, with a deviation of 1: the first loss would be above 200.
                torch.nn.init.normal_(model.get_input_embeddings().weight, std=config.text_config.initializer_range)
            else:
                model = Qwen3VLForConditionalGeneration(config).to(DTYPE)
    finally:
        torch.set_default_dtype(usual)
    made: torch.nn.Module = model.train()
    return made


class NemoStep(PeerStep):
    """An optimizer step as NeMo Automodel's recipe makes it on one GPU."""

    def __init__(self, model: torch.nn.Module):
        from nemo_automodel.components.loss.linear_ce import FusedLinearCrossEntropy
        from nemo_automodel.components.models.common.packing import configure_packing, get_model_attn_implementation

        super().__init__(model)
        self.packing = configure_packing(get_model_attn_implementation(model), model=model)
        self.loss = FusedLinearCrossEntropy(impl="torch_compile")  # of its losses the fastest, it says

    def __call__(self, batch: Inputs) -> float:
        """Trains on a pack and returns its mean loss."""
        from nemo_automodel.components.loss.utils import calculate_loss
        from nemo_automodel.components.training.model_output_utils import get_final_hidden_states

        inputs = dict(batch)
        labels, targets = inputs.pop("labels"), inputs.pop("targets")
        out = self.model(**inputs, use_cache=False, logits_to_keep=1, output_hidden_states=True)
        hidden = get_final_hidden_states(out)
        loss: torch.Tensor = calculate_loss(
            self.loss, model=self.model, labels=labels, hidden_states=hidden, num_label_tokens=targets
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    def inputs(self, batch: PackedBatch) -> Inputs:
        """A pack without padding, as NeMo Automodel's collation would make it for this model, on the device."""
        from nemo_automodel.components.datasets.packed_seq import (
            packed_seq_params_from_doc_ids,
            to_flash_attention_kwargs,
        )
        from nemo_automodel.components.datasets.packing import build_packed_sequence_metadata
        from nemo_automodel.components.datasets.utils import _indexed_mask_to_4d_block_causal

        assert batch.input_ids is not None
        assert batch.labels is not None
        lengths = torch.diff(batch.cu_seqlens).long().cpu()
        documents = torch.repeat_interleave(torch.arange(1, len(lengths) + 1), lengths)[None]
        made: Inputs = {
            "input_ids": batch.input_ids,
            "labels": batch.labels,
            "targets": int((batch.labels >= 0).sum()),
            "position_ids": batch.position_ids,
            "mm_token_type_ids": (batch.input_ids == self.model.config.image_token_id).long(),
        }
        if self.packing.packed_mask_type == "flash_varlen":
            made |= to_flash_attention_kwargs(packed_seq_params_from_doc_ids(documents))
        elif self.packing.packed_mask_type == "block_causal":
            made["attention_mask"] = _indexed_mask_to_4d_block_causal(documents)
        else:
            made["attention_mask"] = documents
        if self.packing.requires_packed_sequence_metadata:
            made |= build_packed_sequence_metadata(documents)
            made["_packed_seq_ids"] = documents
        if len(batch.image_grid_thw):
            made |= {"pixel_values": batch.pixel_values(DTYPE), "image_grid_thw": batch.image_grid_thw}
        return {name: each.to(DEVICE) if isinstance(each, torch.Tensor) else each for name, each in made.items()}
