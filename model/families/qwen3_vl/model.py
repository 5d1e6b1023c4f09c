"""Qwen3-VL: the whole model of :mod:`vlmdata.model.network.vision_language`, with deepstack.

Mirrors transformers' ``Qwen3VLModel`` and ``Qwen3VLForConditionalGeneration``.

Deepstack: the tower returns further features of each token of an image or video, which the first decoder layers add to
their outputs, one each. They arrive with the embeddings, in the same exchange, so a context-parallel rank gets those of
its own tokens. A pipeline stage adds those of its own layers and sends the others beside its hidden states. Once all
are added, stages exchange hidden states only.

Shapes: placeholders among those that this rank's layers compute m, features not added yet k, hidden H.
"""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from torch import Tensor

from vlmdata.batch import PackedBatch
from vlmdata.model.network.vision_language import VisionLanguageModel
from vlmdata.model.parallel.embedding_rows import ItemEmbeddings
from vlmdata.model.parallel.item_blocks import ItemBlocks
from vlmdata.model.parallel.packed import PackIndex, PackParams, to_device


class Qwen3VL(VisionLanguageModel):
    """``Qwen3VLForConditionalGeneration``, or one pipeline stage of it; built by ``build.py``.

    Args:
        args: See :class:`~vlmdata.model.network.vision_language.VisionLanguageModel`.
        language_only: Whether there is no tower on any stage.
    """

    def __init__(self, *args: Any, language_only: bool) -> None:
        super().__init__(*args)
        layers = self.language.decoder.layers
        first = layers[0].layer_number - 1
        features = 0 if language_only else len(self.architecture.vision.deepstack_layers)
        #: Features that no earlier stage adds, and how many of them this stage adds.
        self._due = max(features - first, 0)
        self._added = min(self._due, len(layers))

    def _beside(self, batch: PackedBatch, index: PackIndex, found: ItemEmbeddings | None) -> Tensor | None:
        """Returns the deepstack features of the placeholders that this rank's layers compute, (m * k, 1, H)."""
        if found is None or not self._due:
            return None
        width = self.architecture.vision.out_hidden_size
        rows = found.rows[:, width:]
        if self.config.sequence_parallel:
            # Tensor-parallel ranks add the features of different tokens, so gradients are summed over the ranks.
            rows = copy_to_tensor_model_parallel_region(rows, group=self.pg_collection.tp)
        _, which = found.places(self._layer_tokens(index))
        features: Tensor = rows.index_select(0, which).view(-1, 1, width)
        return features

    def _due_later(self, beside: Tensor) -> Tensor | None:
        if self._added == self._due:
            return None
        due: Tensor = beside.unflatten(0, (-1, self._due))[:, self._added :].flatten(0, 1)
        return due

    def _decoder_inputs(
        self, batch: PackedBatch, index: PackIndex, pack: PackParams, beside: Tensor | None
    ) -> dict[str, Any]:
        if beside is None:
            return {}
        tokens = ItemBlocks.of(batch, self.architecture.vision.merge_unit).among(self._layer_tokens(index))
        pack.item_tokens = to_device(tokens, batch.position_ids.device)
        return {"features": beside.unflatten(0, (-1, self._due)).squeeze(2)[:, : self._added]}
