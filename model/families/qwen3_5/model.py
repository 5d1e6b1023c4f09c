"""Qwen3.5-VL: the whole model of :mod:`vlmdata.model.network.vision_language`, with multi-token prediction.

Mirrors transformers' ``Qwen3_5Model`` and ``Qwen3_5ForConditionalGeneration``. The embeddings of the following tokens,
which multi-token prediction needs on the last stage, go beside the hidden states.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from vlmdata.batch import IGNORE_INDEX, PackedBatch
from vlmdata.model.network.targets import TargetRows
from vlmdata.model.network.vision_language import VisionLanguageModel
from vlmdata.model.parallel.embedding_rows import ItemEmbeddings
from vlmdata.model.parallel.exchange import all_gather_plain
from vlmdata.model.parallel.packed import IntArray, PackIndex, PackParams, to_device


class Qwen35VL(VisionLanguageModel):
    """``Qwen3_5ForConditionalGeneration``, or one pipeline stage of it; built by ``build.py``.

    Args:
        args: See :class:`~vlmdata.model.network.vision_language.VisionLanguageModel`.
        mtp: Whether multi-token prediction is trained.
    """

    def __init__(self, *args: Any, mtp: bool) -> None:
        super().__init__(*args)
        self.mtp = mtp

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Metrics that any rank may have counted, in the same order on all ranks."""
        return super().metric_names + (("mtp_loss",) if self.mtp else ())

    def _targets(self, batch: PackedBatch, index: PackIndex) -> tuple[TargetRows, ...]:
        targets = super()._targets(batch, index)
        if not self.mtp:
            return targets
        assert batch.labels is not None
        assert batch.loss_weights is not None
        labels = self._next_of(batch.labels, index, fill=IGNORE_INDEX)
        return (*targets, TargetRows(labels, self._next_of(batch.loss_weights, index, fill=0)))

    def _predicts(self, batch: PackedBatch) -> bool:
        return self.mtp and (batch.holds("labels") or not self.post_process)

    def _tokens_wanted(self, batch: PackedBatch, index: PackIndex) -> IntArray:
        return np.concatenate([index.local, index.following]) if self._predicts(batch) else index.local

    def _beside(self, batch: PackedBatch, index: PackIndex, found: ItemEmbeddings | None) -> Tensor | None:
        if not self._predicts(batch):
            return None
        assert batch.input_ids is not None
        following = self._merge(self._next_of(batch.input_ids, index, fill=0), found, index.following)
        real = to_device(index.following >= 0, following.device)[:, None, None]
        return self._scatter(following * real)

    def _decoder_inputs(
        self, batch: PackedBatch, index: PackIndex, pack: PackParams, beside: Tensor | None
    ) -> dict[str, Any]:
        if beside is None or not self._predicts(batch):
            return {}
        ignored = None  # by the statistics of the predictor's router
        if self.router_state is not None:
            ignored = self._local_mask(to_device(index.following < 0, batch.position_ids.device).unsqueeze(0))
        return {"extra": (beside, ignored)}

    def _next_of(self, values: Tensor, index: PackIndex, fill: int) -> Tensor:
        """Returns each token's successor value within its sample, or ``fill`` at the end; (1, t) to (1, t)."""
        cp = self.pg_collection.cp
        everything = all_gather_plain(values[0], cp).flatten()
        place = index.following
        size = dist.get_world_size(cp)
        if size > 1:
            place = index.gathered_place(place, size)
        found = everything.index_select(0, to_device(np.maximum(place, 0), values.device))
        missing = to_device(index.following < 0, values.device)
        return found.masked_fill(missing, fill).unsqueeze(0)
