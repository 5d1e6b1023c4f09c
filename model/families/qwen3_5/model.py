"""The whole model: vision tower, merging, decoder. Start here.

Mirrors transformers' ``Qwen3_5Model`` and ``Qwen3_5ForConditionalGeneration``.

A rank gets a :class:`PackedBatch` as the loader yields it. On the first pipeline stage

1. every context-parallel rank encodes its share of the pack's images; where the tower is not tensor parallel, its
   tensor-parallel ranks encode different images of the share,
2. a collective or two give all ranks all image embeddings,
3. every rank puts those of its own tokens in place of the placeholders' embeddings,
4. tensor-parallel ranks keep their part of the tokens (sequence parallelism), once.

All ranks know all sizes from the grids of the whole pack, so none decides by its own data whether to take part in a
collective; a rank without images encodes a dummy for the parameters' sake.

Shapes: tokens of the pack T, of this rank t, hidden H, image tokens of the pack M.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.enums import ModelType
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from model.families.qwen3_5.architecture import Qwen35Architecture
from model.families.qwen3_5.language import Following, Qwen35Language
from model.metrics import MetricSums
from model.network.router import RouterState
from model.network.targets import TargetRows, Targets
from model.network.vision import VisionTower
from model.parallel.exchange import all_gather_plain, all_gather_rows
from model.parallel.packed import ImageRows, PackIndex, to_device
from vlmdata.batch import IGNORE_INDEX, PackedBatch


class Qwen35VL(MegatronModule):
    """``Qwen3_5ForConditionalGeneration``, or a pipeline stage of it; ``build.py`` makes it.

    Args:
        config: Of the decoder.
        architecture: Of the model.
        vision: The tower; None past the first stage.
        language: The decoder's part.
        metrics: Where losses beside the main one are counted.
        router_state: Shared by all routers; None without experts.
        mtp: Whether multi-token prediction is trained.
    """

    def __init__(
        self,
        config: TransformerConfig,
        architecture: Qwen35Architecture,
        vision: VisionTower | None,
        language: Qwen35Language,
        metrics: MetricSums,
        router_state: RouterState | None,
        mtp: bool,
    ) -> None:
        super().__init__(config=config)
        self.architecture = architecture
        self.vision, self.language = vision, language
        self.metrics, self.router_state, self.mtp = metrics, router_state, mtp
        # What megatron-core's schedules and gradient reduction ask a model for.
        self.model_type = ModelType.encoder_or_decoder
        self.pre_process, self.post_process = language.pre_process, language.post_process
        self.share_embeddings_and_output_weights = language.share_embeddings_and_output_weights
        self.pg_collection = language.pg_collection
        self._received: Tensor | None = None

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Metrics that ``metrics.pop`` of all ranks may hold, in a common order."""
        aux = self.router_state is not None and self.config.moe_router_load_balancing_type != "none"
        return (("moe_aux_loss",) if aux else ()) + (("mtp_loss",) if self.mtp else ())

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """The weight that the first and the last stage share; megatron-core sums its gradient."""
        weight: Tensor | None = self.language.shared_embedding_or_output_weight()
        return weight

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor | None] | None) -> None:
        """Takes what the previous stage sent; called by megatron-core's schedules."""
        self._received = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """As megatron-core's, but for Transformer Engine's extra states, which hold nothing that a run needs.

        They are scaling histories of one FP8 recipe, rebuilt within a few steps. Without them both back ends write the
        same keys, and either reads the other's checkpoints.
        """
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return {name: entry for name, entry in state.items() if not _is_extra_state(name)}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As torch's; extra states may be missing.

        Raises:
            RuntimeError: If parameters are missing or unexpected, and ``strict``.
        """
        result = super().load_state_dict(state_dict, strict=False, assign=assign)
        missing = [name for name in result.missing_keys if not _is_extra_state(name)]
        unexpected = [name for name in result.unexpected_keys if not _is_extra_state(name)]
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"the state does not fit the model: missing {missing[:8]} ({len(missing)}), "
                f"unexpected {unexpected[:8]} ({len(unexpected)})"
            )
        return result

    def forward(self, batch: PackedBatch) -> Tensor:
        """Computes a pack, or this rank's slice of it.

        Args:
            batch: As the loader yields it, on the model's device. The first stage needs tokens and pixels, the last
                one labels (without them it gives logits), others neither. With a load-balancing loss and pipeline
                stages all need labels.

        Returns:
            On the last stage float32 (1, t): the loss of every token times its weight, 0 off target, to be summed; or
            logits (1, t, V) without labels, V the vocabulary of this tensor-parallel rank. On other stages what the
            next one takes.

        Raises:
            ValueError: If the batch is not this rank's, lacks a part, or contradicts itself.
        """
        cp = self.pg_collection.cp
        size, rank = dist.get_world_size(cp), dist.get_rank(cp)
        index = PackIndex.of(batch, size, rank)
        device = batch.position_ids.device
        layout = index.layout(batch.max_seqlen, size, rank, device)
        predicting = self.mtp and (batch.labels is not None or not self.post_process)
        assert layout.token_index is not None
        embeddings = following = None
        if self.pre_process:
            embeddings, following = self._embed(batch, index, predicting)
        else:
            following = self._receive()
        padding_mask, nothing_follows = self._padding_masks(batch, index)
        self._weigh_router_loss(batch)
        output = self.language.decode(
            embeddings,
            batch.position_ids.index_select(2, layout.token_index),
            layout,
            padding_mask,
            self._targets(batch, index) if self.post_process else None,
            None if following is None or not predicting else Following(following, nothing_follows),
        )
        if self.router_state is not None and torch.is_grad_enabled():
            output = _RestoreRouterWeight.apply(output, self.router_state, self.router_state.weight)
        if self.post_process or following is None:
            return output
        # The embeddings of the following tokens travel to the last stage behind the hidden states.
        return torch.cat([output, following])

    def _embed(self, batch: PackedBatch, index: PackIndex, predicting: bool) -> tuple[Tensor, Tensor | None]:
        """Merged inputs of the decoder (t, 1, H), and those of the tokens that follow, for multi-token prediction."""
        if batch.input_ids is None:
            raise ValueError(
                f"pack {batch.pack} came without tokens, which the first pipeline stage needs: load the part 'tokens'"
            )
        assert self.vision is not None
        cp, sharing, device = self.pg_collection.cp, self.vision.sharing_group, batch.input_ids.device
        images = ImageRows.of(
            batch,
            self.architecture.vision.merge_unit,
            dist.get_world_size(cp),
            dist.get_rank(cp),
            dist.get_world_size(sharing),
            dist.get_rank(sharing),
        )
        assert batch.patches is not None
        rows = self.vision(images.patches_of(batch.patches), images.grids)
        rows = all_gather_rows(rows, images.part_counts, sharing, sum_gradients=False)
        rows = all_gather_rows(rows, images.counts, cp)
        where, which = images.places(index.local, device)
        _check_placeholders(batch, where, self.architecture.image_token_id)
        embeddings = self._merge(batch.input_ids, rows, where, which)
        if not predicting:
            return self._scatter(embeddings), None
        following = self._merge(
            self._next_of(batch.input_ids, index, fill=0), rows, *images.places(index.following, device)
        )
        real = to_device(index.following >= 0, device)[:, None, None]
        return self._scatter(embeddings), self._scatter(following * real)

    def _merge(self, input_ids: Tensor, rows: Tensor, where: Tensor, which: Tensor) -> Tensor:
        """Embeddings of tokens, with image embeddings in their places; (1, t) to (t, 1, H)."""
        embedded: Tensor = self.language.embedding(input_ids=input_ids, position_ids=None)
        # The sum keeps the gather, whose backward pass is a collective, and the tower in every rank's graph, whether or
        # not any image token is here.
        source = rows.index_select(0, which).unsqueeze(1).to(embedded.dtype)
        return embedded.index_copy(0, where, source) + 0.0 * rows.sum().to(embedded.dtype)

    def _scatter(self, x: Tensor) -> Tensor:
        """This tensor-parallel rank's part of the tokens, under sequence parallelism."""
        if not self.config.sequence_parallel:
            return x
        part: Tensor = scatter_to_sequence_parallel_region(x, group=self.pg_collection.tp)
        return part

    def _receive(self) -> Tensor | None:
        """Hands the decoder what the previous stage sent, and keeps the embeddings that travel with it."""
        received = self._received
        if received is None or not self.mtp:
            self.language.set_input_tensor(received)
            return None
        hidden, following = received.chunk(2)
        self.language.set_input_tensor(hidden)
        return following

    def _padding_masks(self, batch: PackedBatch, index: PackIndex) -> tuple[Tensor | None, Tensor | None]:
        """Tokens that the routers' statistics leave out, in the decoder and in multi-token prediction; bool (1, t)."""
        if self.router_state is None:
            return None, None
        device = batch.padding_mask.device
        nothing_follows = to_device(index.following < 0, device).unsqueeze(0)
        return self._local_mask(batch.padding_mask), self._local_mask(nothing_follows)

    def _local_mask(self, mask: Tensor) -> Tensor:
        if not self.config.sequence_parallel:
            return mask
        group = self.pg_collection.tp
        return mask.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)].contiguous()

    def _targets(self, batch: PackedBatch, index: PackIndex) -> Targets | None:
        if batch.labels is None:
            return None
        assert batch.loss_weights is not None
        after_next = None
        if self.mtp:
            after_next = TargetRows(
                self._next_of(batch.labels, index, fill=IGNORE_INDEX), self._next_of(batch.loss_weights, index, fill=0)
            )
        return Targets(TargetRows(batch.labels, batch.loss_weights), after_next)

    def _next_of(self, values: Tensor, index: PackIndex, fill: int) -> Tensor:
        """What stands at the following token of the sample; (1, t) to (1, t), ``fill`` where none follows."""
        cp = self.pg_collection.cp
        everything = all_gather_plain(values[0], cp).flatten()
        place = index.following
        size = dist.get_world_size(cp)
        if size > 1:
            place = index.gathered_place(place, size)
        found = everything.index_select(0, to_device(np.maximum(place, 0), values.device))
        missing = to_device(index.following < 0, values.device)
        return found.masked_fill(missing, fill).unsqueeze(0)

    def _weigh_router_loss(self, batch: PackedBatch) -> None:
        """Tells the routers what the targets of this pack weigh."""
        if self.router_state is None or "moe_aux_loss" not in self.metric_names:
            return
        if batch.labels is None:
            if not torch.is_grad_enabled():
                return
            raise ValueError(
                f"pack {batch.pack} came without labels, but the load-balancing loss is weighed by the targets: "
                "load the part 'labels' on every pipeline stage, or set moe_aux_loss to 0"
            )
        assert batch.loss_weights is not None
        weight = batch.loss_weights.sum()
        if dist.get_world_size(self.pg_collection.cp) > 1:
            dist.all_reduce(weight, group=self.pg_collection.cp)
        self.router_state.weight = weight


class _RestoreRouterWeight(torch.autograd.Function):
    """Sets the routers' weight back to this micro-batch's before its backward pass, for layers recomputed in it."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, state: RouterState, weight: Tensor | float) -> Tensor:
        ctx.state, ctx.weight = state, weight
        return output.clone() if output.is_leaf else output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.state.weight = ctx.weight
        return gradients[0], None, None


def _is_extra_state(name: str) -> bool:
    """Transformer Engine's FP8 statistics: one a layer, or one an expert (``_extra_state3``)."""
    return name.rpartition(".")[2].startswith("_extra_state")


def _check_placeholders(batch: PackedBatch, where: Tensor, image_token_id: int) -> None:
    """On the CPU, where looking costs nothing: images must stand where the ids say so."""
    assert batch.input_ids is not None
    if batch.input_ids.device.type != "cpu":
        return
    ids = batch.input_ids[0]
    found = int((ids == image_token_id).sum())
    if found != where.numel() or not bool((ids[where] == image_token_id).all()):
        raise ValueError(
            f"pack {batch.pack} has {found} tokens of id {image_token_id} (<|image_pad|>), but its image grids cover "
            f"{where.numel()}, or other places; is the architecture's vocabulary the dataset's? "
            "See Architecture.with_vocabulary"
        )
