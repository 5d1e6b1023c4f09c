"""How a pack lies on this rank: segments, local tokens, image rows. Worked out once a forward, shared by all layers.

Everything follows from ``cu_seqlens_padded``, the image grids and the context-parallel rank, which every rank knows, so
ranks agree on all sizes without talking. Shapes: tokens of the pack T, tokens of this rank t, segments S, images N.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from vlmdata.batch import PackedBatch
from vlmdata.context_parallel import partition_indices
from vlmdata.vision_split import image_owners

IntArray = npt.NDArray[np.int64]


@dataclass
class PackedLayout(PackedSeqParams):
    """megatron-core's packed-sequence parameters, with what our own layers need besides.

    The padded boundaries are given as *the* boundaries: padding stands at the end of a segment, where the causal order
    of attention, convolution and delta rule keeps it from the real tokens, and one set of boundaries serves all layers
    and kernels (``pad_between_seqs`` would rule out FlashAttention).

    Attributes:
        bounds: Segment boundaries of the whole pack, on the host.
        context_size: Context-parallel size.
        context_rank: Context-parallel rank.
        token_index: int64 (t,), place in the pack of every token held here, on the device.
        gathered_order: int64 (T,), for every token of the pack its row in the rank-order concatenation of all ranks'
            tokens; None without context parallelism.
    """

    bounds: tuple[int, ...] = ()
    context_size: int = 1
    context_rank: int = 0
    token_index: torch.Tensor | None = None
    gathered_order: torch.Tensor | None = None

    @property
    def local_bounds(self) -> tuple[int, ...]:
        """Segment boundaries among the tokens held here."""
        return tuple(bound // self.context_size for bound in self.bounds)


@dataclass(frozen=True)
class PackIndex:
    """Host-side index arithmetic of a pack.

    Attributes:
        bounds: int64 (S + 1,), padded segment boundaries.
        true_ends: int64 (S,), one past the last real token of every segment.
        local: int64 (t,), place in the pack of every token held here.
        following: int64 (t,), place of the next real token of the same sample; -1 where there is none.
    """

    bounds: IntArray
    true_ends: IntArray
    local: IntArray
    following: IntArray

    @classmethod
    def of(cls, batch: PackedBatch, context_size: int, context_rank: int) -> PackIndex:
        """Reads the boundaries of a batch.

        Raises:
            ValueError: If the batch is another slice than this rank's.
        """
        held = batch.context_parallel
        have = (held.rank, held.size) if held is not None else (0, 1)
        if have != (context_rank, context_size):
            raise ValueError(
                f"this is context-parallel rank {context_rank} of {context_size}, but the batch is slice {have[0]} of "
                f"{have[1]}: give the loader context_parallel={context_size} and context_parallel_rank={context_rank}, "
                "or slice with batch.context_parallel_shard"
            )
        bounds, true_lengths = batch.host.cu_seqlens_padded, np.diff(batch.host.cu_seqlens)
        local = partition_indices(bounds, batch.total_tokens, context_size, context_rank)
        true_ends = bounds[:-1] + true_lengths
        segment = np.searchsorted(bounds, local, side="right") - 1
        following = np.where(local + 1 < true_ends[segment], local + 1, -1)
        return cls(bounds, true_ends, local, following)

    def gathered_place(self, tokens: IntArray, context_size: int) -> IntArray:
        """Where tokens of the pack lie in the rank-order concatenation of all ranks' tokens; -1 stays -1."""
        total = int(self.bounds[-1])
        ranks = [partition_indices(self.bounds, total, context_size, rank) for rank in range(context_size)]
        order = np.empty(total, np.int64)
        order[np.concatenate(ranks)] = np.arange(total)
        return np.where(tokens >= 0, order[tokens], -1)

    def layout(self, max_seqlen: int, context_size: int, context_rank: int, device: torch.device) -> PackedLayout:
        """The layers' view of it, its tensors on a device."""
        bounds = to_device(self.bounds.astype(np.int32), device)
        order = None
        if context_size > 1:
            order = self.gathered_place(np.arange(self.bounds[-1]), context_size)
        return PackedLayout(
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
            token_index=to_device(self.local, device),
            gathered_order=None if order is None else to_device(order, device),
        )


@dataclass(frozen=True)
class ImageRows:
    """Where the merged image embeddings of a pack go.

    Context-parallel ranks hold different images. Where the tower is not tensor parallel, the ranks of a tensor-parallel
    group, which hold the same ones, encode different parts of them.

    Attributes:
        counts: Embedding rows of each context-parallel rank's images, in rank order.
        part_counts: Of this context-parallel rank's, those that each part makes.
        grids: Host copy of the grids of the images this rank encodes, in order.
        held: Half-open ranges of the patches held here that are theirs, in order.
        row_of_token: int64 (T,), for every token of the pack its row among the gathered embeddings; -1 for text.
    """

    counts: tuple[int, ...]
    part_counts: tuple[int, ...]
    grids: tuple[tuple[int, int, int], ...]
    held: tuple[tuple[int, int], ...]
    row_of_token: IntArray

    @classmethod
    def of(
        cls,
        batch: PackedBatch,
        merge_unit: int,
        context_size: int,
        context_rank: int,
        parts: int = 1,
        part: int = 0,
    ) -> ImageRows:
        """Works it out from the grids of the whole pack, alike on all ranks.

        Args:
            batch: This context-parallel rank's.
            merge_unit: Patches of an embedding row.
            context_size: Context-parallel size.
            context_rank: Context-parallel rank.
            parts: Parts that encode a context-parallel rank's images.
            part: Which of them this rank is.

        Raises:
            ValueError: If an image leaves the pack, or the patches held do not match the grids.
        """
        grids, starts = batch.host.image_grid_thw.reshape(-1, 3), batch.host.image_starts
        owners = image_owners(grids, context_size)
        rows = grids.prod(1) // merge_unit
        here = owners == context_rank
        _check_images(batch, grids, starts, rows, here)
        part_of = np.zeros(len(grids), np.int64)
        for rank in range(context_size if parts > 1 else 0):
            part_of[owners == rank] = image_owners(grids[owners == rank], parts)
        # Gathered rows run over ranks, within a rank over parts, and within a part over its images in pack order.
        order = np.lexsort((np.arange(len(grids)), part_of, owners))
        first_row = np.empty(len(grids), np.int64)
        first_row[order] = np.cumsum(rows[order]) - rows[order]
        row_of_token = np.full(batch.total_tokens, -1, np.int64)
        for start, row, count in zip(starts.tolist(), first_row.tolist(), rows.tolist(), strict=True):
            row_of_token[start : start + count] = np.arange(row, row + count)
        counts = np.bincount(owners, weights=rows, minlength=context_size).astype(np.int64)
        part_counts = np.bincount(part_of[here], weights=rows[here], minlength=parts).astype(np.int64)
        mine = [(int(t), int(h), int(w)) for t, h, w in grids[here & (part_of == part)]]
        held = _ranges(grids[here].prod(1), part_of[here] == part)
        return cls(tuple(counts.tolist()), tuple(part_counts.tolist()), tuple(mine), held, row_of_token)

    def patches_of(self, patches: torch.Tensor) -> torch.Tensor:
        """Of the patches held here (P, ...) those of the images this rank encodes."""
        if self.held == ((0, patches.shape[0]),):
            return patches
        return torch.cat([patches[start:end] for start, end in self.held]) if self.held else patches[:0]

    def places(self, tokens: IntArray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Which of some tokens are image tokens, and their embedding rows.

        Args:
            tokens: (t,) places in the pack; -1 for no token.
            device: Where the results go.

        Returns:
            Indices into ``tokens``, and rows of the gathered embeddings; int64, equally long.
        """
        rows = np.where(tokens >= 0, self.row_of_token[tokens], -1)
        where = np.flatnonzero(rows >= 0)
        return to_device(where, device), to_device(rows[where], device)


def to_device(array: npt.NDArray[Any] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host array on a device, without waiting for what the device is doing."""
    tensor = array if isinstance(array, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _ranges(lengths: IntArray, chosen: npt.NDArray[np.bool_]) -> tuple[tuple[int, int], ...]:
    """Where the chosen of some blocks lie, which follow one another; neighbours as one range."""
    ends = np.cumsum(lengths)
    found: list[tuple[int, int]] = []
    for end, length in zip(ends[chosen].tolist(), lengths[chosen].tolist(), strict=True):
        if found and found[-1][1] == end - length:
            found[-1] = (found[-1][0], end)
        else:
            found.append((end - length, end))
    return tuple(found)


def _check_images(
    batch: PackedBatch, grids: IntArray, starts: IntArray, rows: IntArray, mine: npt.NDArray[np.bool_]
) -> None:
    outside = np.flatnonzero((starts < 0) | (starts + rows > batch.total_tokens))
    if outside.size:
        at = int(outside[0])
        raise ValueError(
            f"image {at} of pack {batch.pack} spans tokens {starts[at]} to {starts[at] + rows[at]}, outside the pack's "
            f"{batch.total_tokens}"
        )
    if batch.patches is None:
        raise ValueError(
            f"pack {batch.pack} came without pixels, which the first pipeline stage needs: load the part 'pixels'"
        )
    need = int(grids[mine].prod(1).sum())
    if batch.patches.shape[0] != need:
        raise ValueError(
            f"pack {batch.pack} holds {batch.patches.shape[0]} patches, but the {int(mine.sum())} images of this rank "
            f"have {need}"
        )
    held = batch.host.image_indices
    if held.tolist() != np.flatnonzero(mine).tolist():
        raise ValueError(
            f"pack {batch.pack} holds the patches of images {held.tolist()}, but this rank encodes images "
            f"{np.flatnonzero(mine).tolist()}: cut it with PackedBatch.context_parallel_shard or the loader"
        )
