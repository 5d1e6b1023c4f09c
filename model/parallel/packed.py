"""Layout of a pack on this rank: segments and local tokens. All layers of a forward pass share it.

Every rank knows ``cu_seqlens_padded``, from which all follows, so ranks agree on all sizes without communication.

Shapes: tokens of the pack T, tokens on this rank t, segments S.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from vlmdata.batch import PackedBatch
from vlmdata.context_parallel import partition_indices

IntArray = npt.NDArray[np.int64]

#: Tokens of a chunk in flash-linear-attention's gated delta rule.
DELTA_CHUNK = 64


@dataclass
class PackParams(PackedSeqParams):
    """A pack as the layers take it: megatron-core's parameters, and what our own layers need in addition.

    The padded boundaries serve as the only boundaries: padding is at the end of a segment, where causal attention,
    convolution and delta rule keep it from the real tokens. One set of boundaries thus serves all layers and kernels
    (``pad_between_seqs`` would rule out FlashAttention).
    """

    bounds: tuple[int, ...] = ()  # segment boundaries of the whole pack, on the host
    context_size: int = 1  # context-parallel size
    context_rank: int = 0  # context-parallel rank
    #: int64 (t,), index in the pack of each token on this rank, on the device; None without context parallelism.
    token_index: torch.Tensor | None = None
    #: int64 (T,), for each token of the pack its row in the rank-order concatenation of all ranks' tokens; None
    #: without context parallelism.
    gathered_order: torch.Tensor | None = None
    #: int64 (m,), placeholders among the tokens that this rank's layers compute; None if no layer adds their features.
    item_tokens: torch.Tensor | None = None

    @cached_property
    def sample_starts(self) -> torch.Tensor:
        """int32 (T,), for each token of the pack the first token of its segment, on the device."""
        bounds = np.array(self.bounds)
        assert self.cu_seqlens_q is not None
        return to_device(np.repeat(bounds[:-1], np.diff(bounds)).astype(np.int32), self.cu_seqlens_q.device)

    @cached_property
    def delta_chunks(self) -> torch.Tensor:
        """int32 (m, 2), for each chunk of the delta rule its segment and its number in it, on the device.

        flash-linear-attention's ``prepare_chunk_indices``, which copies the boundaries from the device.
        """
        counts = -(-np.diff(np.array(self.bounds)) // DELTA_CHUNK)
        segment = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(segment)) - np.repeat(np.cumsum(counts) - counts, counts)
        assert self.cu_seqlens_q is not None
        return to_device(np.stack([segment, number], 1).astype(np.int32), self.cu_seqlens_q.device)

    @cached_property
    def rank_order(self) -> torch.Tensor:
        """int64 (T,), the inverse of ``gathered_order``: for each row of the concatenation its token of the pack."""
        assert self.gathered_order is not None
        tokens = torch.arange(len(self.gathered_order), device=self.gathered_order.device)
        return torch.empty_like(tokens).index_copy_(0, self.gathered_order, tokens)

    def own_tokens(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns the tokens on this rank from a tensor with a dimension for all tokens of the pack."""
        return x if self.token_index is None else x.index_select(dim, self.token_index)

    @property
    def local_bounds(self) -> tuple[int, ...]:
        """Segment boundaries among the tokens on this rank."""
        return tuple(bound // self.context_size for bound in self.bounds)


@dataclass(frozen=True)
class PackIndex:
    """Host-side index arithmetic of a pack."""

    bounds: IntArray  # int64 (S + 1,), padded segment boundaries
    true_ends: IntArray  # int64 (S,), one past the last real token of each segment
    local: IntArray  # int64 (t,), index in the pack of each token on this rank
    following: IntArray  # int64 (t,), index of the next real token of the same sample; -1 if none

    @classmethod
    def of(cls, batch: PackedBatch, context_size: int, context_rank: int) -> PackIndex:
        """Builds the index from the boundaries of a batch; a ValueError if the batch is the slice of another rank."""
        held = batch.context_parallel
        have = (held.rank, held.size) if held is not None else (0, 1)
        if have != (context_rank, context_size):
            raise ValueError(
                f"this is context-parallel rank {context_rank} of {context_size}, but the batch is slice {have[0]} of "
                f"{have[1]}: load with context_parallel={context_size} and context_parallel_rank={context_rank}, "
                "or slice with batch.context_parallel_shard"
            )
        return cls.of_boundaries(batch.host.cu_seqlens, batch.host.cu_seqlens_padded, context_size, context_rank)

    @classmethod
    def of_boundaries(
        cls, cu_seqlens: IntArray, cu_seqlens_padded: IntArray, context_size: int, context_rank: int
    ) -> PackIndex:
        """Builds the index of any context-parallel rank from the boundaries of a pack, int64 (segments + 1,) each."""
        true_ends = cu_seqlens_padded[:-1] + np.diff(cu_seqlens)
        return cls._of_rank(cu_seqlens_padded, true_ends, context_size, context_rank)

    @classmethod
    def _of_rank(cls, bounds: IntArray, true_ends: IntArray, context_size: int, context_rank: int) -> PackIndex:
        local = partition_indices(bounds, int(bounds[-1]), context_size, context_rank)
        # Tokens ascend, so a search for the bounds finds all segments.
        ends = np.repeat(true_ends, np.diff(np.searchsorted(local, bounds)))
        following = np.where(local + 1 < ends, local + 1, -1)
        return cls(bounds, true_ends, local, following)

    def of_all_ranks(self, context_size: int) -> list[PackIndex]:
        """Returns the index of each context-parallel rank, in rank order."""
        if context_size == 1:
            return [self]
        return [self._of_rank(self.bounds, self.true_ends, context_size, rank) for rank in range(context_size)]

    def gathered_place(self, tokens: IntArray, context_size: int) -> IntArray:
        """Returns the rows of pack tokens in the rank-order concatenation of all ranks' tokens; -1 stays -1."""
        total = int(self.bounds[-1])
        ranks = [partition_indices(self.bounds, total, context_size, rank) for rank in range(context_size)]
        order = np.empty(total, np.int64)
        order[np.concatenate(ranks)] = np.arange(total)
        return np.where(tokens >= 0, order[tokens], -1)

    def params(self, max_seqlen: int, context_size: int, context_rank: int, device: torch.device) -> PackParams:
        """Returns the layers' view of the pack, with tensors on a device."""
        bounds = to_device(self.bounds.astype(np.int32), device)
        order = own = None
        if context_size > 1:
            order = to_device(self.gathered_place(np.arange(self.bounds[-1]), context_size), device)
            own = to_device(self.local, device)
        return PackParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            cu_seqlens_q_padded=bounds,
            cu_seqlens_kv_padded=bounds,
            max_seqlen_q=max_seqlen,
            max_seqlen_kv=max_seqlen,
            pad_between_seqs=False,
            bounds=tuple(self.bounds.tolist()),
            context_size=context_size,
            context_rank=context_rank,
            token_index=own,
            gathered_order=order,
        )


def to_device(array: npt.NDArray[Any] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a host array to a device without waiting for queued work."""
    tensor = array if isinstance(array, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
