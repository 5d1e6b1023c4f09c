"""The whole model: vision tower, merging, decoder, multi-token prediction. Start here.

Mirrors transformers' ``Qwen3_5Model`` and ``Qwen3_5ForConditionalGeneration``. :mod:`model.network.vision_language`
describes the steps and what each rank does.

Shapes: tokens on this rank t, hidden H.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from model.families.qwen3_5.language import Following
from model.network.targets import TargetRows
from model.network.vision_language import VisionLanguageModel
from model.parallel.exchange import all_gather_plain
from model.parallel.packed import PackIndex, to_device
from vlmdata.batch import IGNORE_INDEX, PackedBatch


class Qwen35VL(VisionLanguageModel):
    """``Qwen3_5ForConditionalGeneration``, or one pipeline stage of it; built by ``build.py``.

    Args:
        args: See :class:`~model.network.vision_language.VisionLanguageModel`.
        mtp: Whether multi-token prediction is trained.
    """

    def __init__(self, *args: Any, mtp: bool) -> None:
        super().__init__(*args)
        self.mtp = mtp

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Metrics that any rank may have counted, in the same order on all ranks."""
        return super().metric_names + (("mtp_loss",) if self.mtp else ())

    def forward(self, batch: PackedBatch) -> Tensor:
        """See :meth:`VisionLanguageModel.forward`."""
        index, pack = self._layout(batch)
        predicting = self.mtp and (batch.labels is not None or not self.post_process)
        # Before the tower: the host needs the number of targets at the end of the forward pass.
        targets = self._targets(batch, self._after_next(batch, index))
        embeddings = following = None
        if self.pre_process:
            embeddings, following = self._embed(batch, index, predicting)
        else:
            following = self._receive()
        self._weigh_router_loss(batch)
        output = self.language.decode(
            embeddings,
            pack.own_tokens(batch.position_ids, 2),
            pack,
            self._padding_mask(batch),
            targets,
            extra=None
            if following is None or not predicting
            else Following(following, self._nothing_follows(batch, index)),
        )
        output = self._keep_router_weight(output)
        if self.post_process or following is None:
            return output
        # The embeddings of the following tokens are sent to the last stage after the hidden states.
        return torch.cat([output, following])

    def _embed(self, batch: PackedBatch, index: PackIndex, predicting: bool) -> tuple[Tensor, Tensor | None]:
        """Returns the merged decoder inputs (t, 1, H) and those of the following tokens for multi-token prediction."""
        input_ids = self._tokens_of(batch)
        found = self._encode(
            batch, index, lambda each: np.concatenate([each.local, each.following]) if predicting else each.local
        )
        embeddings = self._merge(input_ids, found, index.local)
        if not predicting:
            return self._scatter(embeddings), None
        following = self._merge(self._next_of(input_ids, index, fill=0), found, index.following)
        real = to_device(index.following >= 0, input_ids.device)[:, None, None]
        return self._scatter(embeddings), self._scatter(following * real)

    def _receive(self) -> Tensor | None:
        """Passes the previous stage's output to the decoder and returns the embeddings that came with it."""
        received = self._received
        if received is None or not self.mtp:
            self.language.set_input_tensor(received)
            return None
        hidden, following = received.chunk(2)
        self.language.set_input_tensor(hidden)
        return following

    def _nothing_follows(self, batch: PackedBatch, index: PackIndex) -> Tensor | None:
        """Returns the tokens that the predictor's router statistics ignore, bool (1, t); None without experts."""
        if self.router_state is None:
            return None
        return self._local_mask(to_device(index.following < 0, batch.position_ids.device).unsqueeze(0))

    def _after_next(self, batch: PackedBatch, index: PackIndex) -> TargetRows | None:
        """Returns the targets of multi-token prediction."""
        if not self.mtp or not self.post_process or batch.labels is None:
            return None
        assert batch.loss_weights is not None
        return TargetRows(
            self._next_of(batch.labels, index, fill=IGNORE_INDEX), self._next_of(batch.loss_weights, index, fill=0)
        )

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
