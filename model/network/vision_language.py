"""The whole model: encode images and videos, exchange embeddings, merge them with the text, decode. Start here.

Mirrors transformers' ``Qwen3VLModel`` and ``Qwen3VLForConditionalGeneration``. A family's ``model.py`` adds what only
its decoder has.

A rank receives a :class:`PackedBatch` from the loader. On the first pipeline stage:

1. Each context-parallel rank encodes its share of the pack's items (images and videos, each as a whole). If the tower
   is not tensor parallel, the tensor-parallel ranks encode different items of that share.
2. Tensor-parallel ranks that encoded different items gather their embeddings. Each context-parallel rank then gets the
   embeddings of its own tokens, and no others.
3. Each rank replaces the placeholder embeddings of its own tokens by those of items.
4. Under sequence parallelism, tensor-parallel ranks keep their part of the tokens.

If the tower is on ranks of its own, the first stage receives the embeddings from there instead of steps 1 and 2
(:mod:`vlmdata.model.parallel.row_exchange`).

All ranks derive all sizes from the grids of the whole pack. No rank decides from its own data whether to join a
collective. A rank without items encodes a dummy image so that all parameters take part.

Pipeline stages send hidden states, and after them what a family's later layers need besides (``beside``): rows of the
same width.

Shapes: tokens of the pack T, tokens on this rank t, hidden H, embeddings of items on this rank m, rows beside r.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core.enums import ModelType
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from vlmdata.batch import PackedBatch
from vlmdata.families import family
from vlmdata.families.chat import IMAGE, VIDEO
from vlmdata.model.architecture import Architecture
from vlmdata.model.metrics import MetricSums
from vlmdata.model.network.decoder import Decoder
from vlmdata.model.network.router import RouterState
from vlmdata.model.network.saved_model import SavedModel
from vlmdata.model.network.targets import TargetRows
from vlmdata.model.network.vision import VisionTower
from vlmdata.model.parallel.embedding_rows import EmbeddingRows, ItemEmbeddings
from vlmdata.model.parallel.exchange import all_gather_rows, exchange_rows
from vlmdata.model.parallel.item_blocks import ItemBlocks
from vlmdata.model.parallel.packed import IntArray, PackIndex, PackParams, to_device
from vlmdata.model.parallel.row_exchange import RowReceiver
from vlmdata.wording import counted


class VisionLanguageModel(SavedModel):
    """A vision-language model, or one pipeline stage of it.

    Args:
        config: Configuration of the decoder.
        architecture: Architecture of the model.
        vision: The tower; None after the first stage, for the language model alone, and if other ranks hold it.
        language: This stage's part of the decoder.
        metrics: Collects additional losses.
        router_state: Shared by all routers; None without experts.

    Attributes:
        receiver: Source of the embeddings of items on the first stage if other ranks hold the tower.
    """

    def __init__(
        self,
        config: TransformerConfig,
        architecture: Architecture,
        vision: VisionTower | None,
        language: Decoder,
        metrics: MetricSums,
        router_state: RouterState | None,
    ) -> None:
        super().__init__(config=config)
        self.architecture = architecture
        self.vision, self.language = vision, language
        self.metrics, self.router_state = metrics, router_state
        # Attributes that megatron-core's schedules and gradient reduction read.
        self.model_type = ModelType.encoder_or_decoder
        self.pre_process, self.post_process = language.pre_process, language.post_process
        self.share_embeddings_and_output_weights = language.share_embeddings_and_output_weights
        self.pg_collection = language.pg_collection
        self._received: Tensor | None = None
        self.receiver: RowReceiver | None = None

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Metrics that any rank may have counted, in the same order on all ranks."""
        aux = self.router_state is not None and self.config.moe_router_load_balancing_type != "none"
        return ("moe_aux_loss",) if aux else ()

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """The weight that the first and last stages share. megatron-core sums its gradient."""
        weight: Tensor | None = self.language.shared_embedding_or_output_weight()
        return weight

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor | None] | None) -> None:
        """Receives the output of the previous stage. megatron-core's schedules call it."""
        self._received = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def forward(self, batch: PackedBatch) -> Tensor:
        """Computes a pack or this rank's slice of it.

        Args:
            batch: A batch from the loader, on the model's device. The first stage needs tokens and pixels. The last
                stage needs labels for losses; without labels it returns logits. With a load-balancing loss and pipeline
                stages, all stages need labels.

        Returns:
            On the last stage float32 (1, t): the loss of each token times its weight, 0 off target, to be summed; or
            without labels logits (1, t, V), with V the vocabulary of this tensor-parallel rank. On other stages the
            input of the next stage.

        Raises:
            ValueError: If the batch belongs to another rank, lacks a part or is inconsistent.
        """
        cp = self.pg_collection.cp
        size, rank = dist.get_world_size(cp), dist.get_rank(cp)
        index = PackIndex.of(batch, size, rank)
        # Before the tower: the host needs the number of targets at the end of the forward pass.
        targets = self._targets(batch, index) if self.post_process and batch.labels is not None else ()
        embeddings, beside = self._embed(batch, index) if self.pre_process else (None, self._receive(index))
        if self.router_state is not None and "moe_aux_loss" in self.metric_names:
            self.router_state.weigh(batch, cp)
        pack = index.params(batch.max_seqlen, size, rank, batch.position_ids.device)
        output = self.language.decode(
            embeddings,
            pack.own_tokens(batch.position_ids, 2),
            pack,
            None if self.router_state is None else self._local_mask(batch.padding_mask),
            targets,
            **self._decoder_inputs(batch, index, pack, beside),
        )
        if self.router_state is not None and torch.is_grad_enabled():
            output = self.router_state.kept_for_backward(output)
        due = None if self.post_process or beside is None else self._due_later(beside)
        return output if due is None else torch.cat([output, due.to(output.dtype)])

    # What families add. Without an override, there is nothing beside the hidden states.

    def _targets(self, batch: PackedBatch, index: PackIndex) -> tuple[TargetRows, ...]:
        """Returns the targets of each head, for a batch with labels."""
        assert batch.labels is not None
        assert batch.loss_weights is not None
        return (TargetRows(batch.labels, batch.loss_weights),)

    def _tokens_wanted(self, batch: PackedBatch, index: PackIndex) -> IntArray:
        """Returns the pack tokens whose embeddings of items a context-parallel rank needs, from its index."""
        return index.local

    def _beside(self, batch: PackedBatch, index: PackIndex, found: ItemEmbeddings | None) -> Tensor | None:
        """Returns what goes beside the hidden states from the first stage, (r, 1, H)."""
        return None

    def _due_later(self, beside: Tensor) -> Tensor | None:
        """Returns the part of ``beside`` that later stages need."""
        return beside

    def _decoder_inputs(
        self, batch: PackedBatch, index: PackIndex, pack: PackParams, beside: Tensor | None
    ) -> dict[str, Any]:
        """Returns further arguments of the decoder."""
        return {}

    def _embed(self, batch: PackedBatch, index: PackIndex) -> tuple[Tensor, Tensor | None]:
        """Returns the merged inputs of the decoder, (t, 1, H), and what goes beside them."""
        if batch.input_ids is None:
            raise ValueError(
                f"pack {batch.pack} has no tokens, which the first pipeline stage needs: load the part 'tokens'"
            )
        found = self._encode(batch, index)
        merged = self._merge(batch.input_ids, found, index.local)
        inputs = self._scatter(merged)
        if vars(self).get("adapted") and torch.is_grad_enabled() and not inputs.requires_grad:
            # Recomputation gives a layer gradients only if its input needs one, and all weights before it are frozen.
            inputs.requires_grad_()
        return inputs, self._beside(batch, index, found)

    def _receive(self, index: PackIndex) -> Tensor | None:
        """Hands the previous stage's hidden states to the decoder, and returns what came beside them."""
        received = self._received
        tokens = len(self._layer_tokens(index))
        assert received is not None
        self.language.set_input_tensor(received[:tokens])
        return received[tokens:] if len(received) > tokens else None

    def _layer_tokens(self, index: PackIndex) -> IntArray:
        """Returns the pack tokens that this rank's layers compute: under sequence parallelism a part of its own."""
        if not self.config.sequence_parallel:
            return index.local
        tp = self.pg_collection.tp
        part = len(index.local) // dist.get_world_size(tp)
        return index.local[dist.get_rank(tp) * part :][:part]

    def _encode(self, batch: PackedBatch, index: PackIndex) -> ItemEmbeddings | None:
        """Encodes this rank's items and exchanges embeddings. Returns None for the language model alone."""
        if self.receiver is None and self.vision is None:
            _require_no_items(batch)
            return None
        blocks = ItemBlocks.of(batch, self.architecture.vision.merge_unit)
        _check_placeholders(batch, blocks, index, self.architecture)
        if self.receiver is not None:
            return self.receiver.receive(blocks)
        assert self.vision is not None
        cp, sharing = self.pg_collection.cp, self.vision.sharing_group
        size, rank = dist.get_world_size(cp), dist.get_rank(cp)
        parts, part = dist.get_world_size(sharing), dist.get_rank(sharing)
        items = EmbeddingRows.of(batch, blocks, size, rank, parts, part)
        routes = items.routes([self._tokens_wanted(batch, each) for each in index.of_all_ranks(size)])
        assert batch.patches is not None
        patches, videos = items.images.of(batch.patches), batch.video_patches
        rows = self.vision(
            patches, items.images.grids, None if videos is None else items.videos.of(videos), items.videos.grids
        )
        rows = all_gather_rows(rows, items.part_counts, sharing, sum_gradients=False)
        if size > 1:
            rows = exchange_rows(rows, to_device(routes.outgoing, rows.device), routes.sent, routes.received, cp)
        return ItemEmbeddings(rows, routes.wanted, items.row_of_token)

    def _merge(self, input_ids: Tensor, found: ItemEmbeddings | None, tokens: IntArray) -> Tensor:
        """Embeds tokens and inserts the embeddings of items; (1, t) to (t, 1, H)."""
        embedded: Tensor = self.language.embedding(input_ids=input_ids, position_ids=None)
        if found is None:
            return embedded
        where, which = found.places(tokens)
        # Adding the sum keeps the tower and the exchange in the graph of every rank, with or without placeholders. The
        # exchange's backward pass is a collective.
        source = found.rows[:, : embedded.shape[-1]].index_select(0, which).unsqueeze(1).to(embedded.dtype)
        return embedded.index_copy(0, where, source) + 0.0 * found.rows.sum().to(embedded.dtype)

    def _scatter(self, x: Tensor) -> Tensor:
        """Returns this tensor-parallel rank's part of the tokens under sequence parallelism."""
        if not self.config.sequence_parallel:
            return x
        part: Tensor = scatter_to_sequence_parallel_region(x, group=self.pg_collection.tp)
        return part

    def _local_mask(self, mask: Tensor) -> Tensor:
        if not self.config.sequence_parallel:
            return mask
        group = self.pg_collection.tp
        return mask.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)].contiguous()


def _require_no_items(batch: PackedBatch) -> None:
    """Raises an error for a pack with images or videos in a model without a tower."""
    images, videos = len(batch.host.image_starts), len(batch.host.video_starts)
    if images or videos:
        found = " and ".join(counted(n, kind) for n, kind in ((images, "image"), (videos, "video")) if n)
        raise ValueError(
            f"pack {batch.pack} has {found}, but the model has no vision tower (language_only): train on data without "
            "images and videos, or with the tower"
        )


def _check_placeholders(batch: PackedBatch, blocks: ItemBlocks, index: PackIndex, architecture: Architecture) -> None:
    """Checks on the CPU, where it costs nothing, that the positions of images and videos match the ids."""
    assert batch.input_ids is not None
    if batch.input_ids.device.type != "cpu":
        return
    ids = batch.input_ids[0]
    token_ids = {IMAGE: architecture.image_token_id, VIDEO: architecture.video_token_id}
    for kind, token_id in token_ids.items():
        if kind == IMAGE or len(batch.host.video_starts):
            token = family(architecture.data_family).expansion(kind).token
            _check_kind(batch, kind, ids, blocks.are_of(videos=kind == VIDEO)[index.local], token, token_id)


def _check_kind(
    batch: PackedBatch, kind: str, ids: Tensor, wanted: npt.NDArray[np.bool_], token: str, token_id: int
) -> None:
    """Checks that the tokens of this rank have a placeholder's id exactly where its items are, bool (t,)."""
    found = ids == token_id
    if not torch.equal(found, torch.from_numpy(wanted)):
        raise ValueError(
            f"pack {batch.pack} has {int(found.sum())} tokens of id {token_id} ({token}), but its {kind} grids "
            f"cover {int(wanted.sum())}, or other places; does the architecture use the dataset's vocabulary? "
            "See Architecture.with_vocabulary"
        )
