"""The whole model: vision tower with deepstack, merging, decoder. Start here.

Mirrors transformers' ``Qwen3VLModel`` and ``Qwen3VLForConditionalGeneration``. :mod:`model.network.vision_language`
describes the steps and what each rank does.

Deepstack: the tower returns further features of each image token, which the first decoder layers add to their outputs,
one each. They arrive with the image embeddings, in the same exchange, so a context-parallel rank gets those of its own
tokens. A pipeline stage adds those of its own layers and sends the others after its hidden states. Once all are added,
stages exchange hidden states only.

Shapes: tokens that this rank's layers compute t, image tokens among them m, features not added yet k, hidden H.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from torch import Tensor

from model.network.vision_language import ImageEmbeddings, VisionLanguageModel
from model.parallel.image_rows import image_tokens
from model.parallel.packed import IntArray, PackIndex, to_device
from vlmdata.batch import PackedBatch


class Qwen3VL(VisionLanguageModel):
    """``Qwen3VLForConditionalGeneration``, or one pipeline stage of it; built by ``build.py``.

    Args:
        args: See :class:`~model.network.vision_language.VisionLanguageModel`.
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

    def forward(self, batch: PackedBatch) -> Tensor:
        """See :meth:`VisionLanguageModel.forward`."""
        index, pack = self._layout(batch)
        tokens = self._layer_tokens(index)
        # Before the tower: the host needs the number of targets at the end of the forward pass.
        targets = self._targets(batch)
        embeddings = features = None
        if self._due:
            places = image_tokens(batch, self.architecture.vision.merge_unit, tokens)
            pack.image_tokens = to_device(places, batch.position_ids.device)
        if self.pre_process:
            embeddings, features = self._embed(batch, index, tokens)
        else:
            features = self._receive(len(tokens))
        self._weigh_router_loss(batch)
        output = self.language.decode(
            embeddings,
            pack.own_tokens(batch.position_ids, 2),
            pack,
            self._padding_mask(batch),
            targets,
            features=None if features is None else features[:, : self._added],
        )
        output = self._keep_router_weight(output)
        if features is None or self._added == self._due or self.post_process:
            return output
        rest = features[:, self._added :].flatten(0, 1).unsqueeze(1)
        return torch.cat([output, rest.to(output.dtype)])

    def _embed(self, batch: PackedBatch, index: PackIndex, tokens: IntArray) -> tuple[Tensor, Tensor | None]:
        """Returns the merged decoder inputs (t, 1, H) and the features (m, k, H) of the image tokens among them."""
        input_ids = self._tokens_of(batch)
        found = self._encode(batch, index, lambda each: each.local)
        embeddings = self._scatter(self._merge(input_ids, found, index.local))
        return embeddings, self._features(found, tokens) if self._due and found is not None else None

    def _features(self, found: ImageEmbeddings, tokens: IntArray) -> Tensor:
        """Returns the deepstack features of the image tokens among some pack tokens, (m, k, H)."""
        width = self.architecture.vision.out_hidden_size
        rows = found.rows[:, width:]
        if self.config.sequence_parallel:
            # Tensor-parallel ranks add the features of different tokens, so gradients are summed over the ranks.
            rows = copy_to_tensor_model_parallel_region(rows, group=self.pg_collection.tp)
        _, which = found.places(tokens)
        features: Tensor = rows.index_select(0, which).unflatten(1, (self._due, width))
        return features

    def _layer_tokens(self, index: PackIndex) -> IntArray:
        """Returns the pack tokens that this rank's layers compute: under sequence parallelism a part of its own."""
        if not self.config.sequence_parallel:
            return index.local
        tp = self.pg_collection.tp
        part = len(index.local) // dist.get_world_size(tp)
        return index.local[dist.get_rank(tp) * part :][:part]

    def _receive(self, tokens: int) -> Tensor | None:
        """Passes the previous stage's hidden states to the decoder and returns the features that came with them."""
        received = self._received
        if received is None or not self._due:
            self.language.set_input_tensor(received)
            return None
        self.language.set_input_tensor(received[:tokens])
        features: Tensor = received[tokens:].unflatten(0, (-1, self._due)).squeeze(2)
        return features
