"""Which rank encodes which images and videos of a pack, and where their embeddings go, from what every rank knows.

Shapes: tokens of the pack T, tokens on this rank t, items (images and videos) N, embedding rows on this rank m.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vlmdata.batch import PackedBatch, PackItems
from vlmdata.model.parallel.item_blocks import ItemBlocks, rows_of
from vlmdata.model.parallel.packed import IntArray, to_device
from vlmdata.packing.item_runs import ItemRuns, pack_runs


@dataclass(frozen=True)
class Share:
    """The images, or the videos and parts of videos, that this rank encodes."""

    grids: tuple[tuple[int, int, int], ...]  # grids of each, in order, on the host
    #: Half-open ranges of their patches among the patches of images, or of videos, on this rank, in order.
    held: tuple[tuple[int, int], ...]
    patches_here: int  # patches of all images, or all videos, on this rank

    def of(self, patches: torch.Tensor) -> torch.Tensor:
        """Selects from the patches on this rank, (P * frames, ...), those of this share."""
        if self.held == ((0, self.patches_here),):
            return patches
        frames = len(patches) // max(self.patches_here, 1)  # each frame of a stored patch of a video is a row
        pieces = [patches[start * frames : end * frames] for start, end in self.held]
        return torch.cat(pieces) if pieces else patches[:0]


@dataclass(frozen=True)
class EmbeddingRows:
    """Destinations of the merged embeddings of a pack's images and videos.

    Context-parallel ranks hold different images, and different videos or temporal patches of them. If the tower is not
    tensor parallel, the ranks of a tensor-parallel group hold the same ones and encode different parts of them.
    """

    counts: tuple[int, ...]  # embedding rows of each context-parallel rank's items, in rank order
    part_counts: tuple[int, ...]  # embedding rows that each part of this context-parallel rank computes
    images: Share
    videos: Share
    #: int64 (T,), for each token of the pack its row among the embeddings of all ranks; -1 for text.
    row_of_token: IntArray
    context_rank: int  # this rank

    @classmethod
    def of(
        cls,
        batch: PackedBatch,
        blocks: ItemBlocks,
        context_size: int,
        context_rank: int,
        parts: int = 1,
        part: int = 0,
    ) -> EmbeddingRows:
        """Computes the rows from the grids of the whole pack, which are equal on all ranks.

        ``batch`` is that of this context-parallel rank, ``blocks`` are those of its pack. Several ``parts`` encode a
        context-parallel rank's items; ``part`` is that of this rank. A ValueError if the patches do not match the
        grids, or are those of another rank.
        """
        items = blocks.items
        of_ranks = pack_runs(items.grids, context_size)
        pieces = [of_ranks.of(rank).split(items.grids, parts) for rank in range(context_size)]
        runs = ItemRuns.joined(pieces)
        owners = np.repeat(np.arange(context_size), [len(each.items) for each in pieces])
        are_videos, rows = items.are_videos[runs.items], runs.rows(items.grids, blocks.rows)
        # Rows of all ranks are ordered by rank, then by part, then as the tower takes them: images before videos.
        order = np.lexsort((np.arange(len(rows)), are_videos, runs.owners, owners))
        first_row = np.empty(len(rows), np.int64)
        first_row[order] = np.cumsum(rows[order]) - rows[order]
        here = owners == context_rank
        counts = np.bincount(owners, weights=rows, minlength=context_size).astype(np.int64)
        part_counts = np.bincount(runs.owners[here], weights=rows[here], minlength=parts).astype(np.int64)
        _check_held(batch, items, of_ranks.of(context_rank))
        images, videos = (
            _share(runs.take(mine).grids(items.grids), runs.owners[mine] == part)
            for mine in (here & ~are_videos, here & are_videos)
        )
        row_of_token = blocks.spread_runs(runs, first_row)
        return cls(tuple(counts.tolist()), tuple(part_counts.tolist()), images, videos, row_of_token, context_rank)

    def routes(self, tokens: Sequence[IntArray]) -> RowRoutes:
        """Returns how embeddings travel so that each context-parallel rank gets those of its ``tokens``, each once.

        ``tokens`` are the pack tokens of each rank; -1 and text tokens need no embedding.
        """
        ends = np.cumsum([0, *self.counts])
        mine, first = self.context_rank, int(ends[self.context_rank])
        wanted = [rows_wanted(self.row_of_token, each, int(ends[-1])) for each in tokens]
        # Rows are ordered by the rank that computes them, so what one rank gets from another is a slice.
        cuts = [np.searchsorted(rows, ends) for rows in wanted]
        outgoing = [rows[cut[mine] : cut[mine + 1]] - first for rows, cut in zip(wanted, cuts, strict=True)]
        sent, received = tuple(len(rows) for rows in outgoing), tuple(np.diff(cuts[mine]).tolist())
        return RowRoutes(np.concatenate(outgoing), sent, received, wanted[mine])


@dataclass(frozen=True)
class RowRoutes:
    """How embeddings travel between context-parallel ranks: each rank gets the rows of its own tokens."""

    outgoing: IntArray  # int64, rows among those that this rank computed, in the order of their destinations
    sent: tuple[int, ...]  # number of rows for each rank
    received: tuple[int, ...]  # number of rows from each rank
    wanted: IntArray  # int64 (m,), ascending rows among those of all ranks that this rank gets


@dataclass(frozen=True)
class ItemEmbeddings:
    """Embeddings of the image and video tokens that a rank needs."""

    rows: torch.Tensor  # (m, (1 + D) * hidden), as the tower returns them
    wanted: IntArray  # int64 (m,), their ascending numbers among the rows of all ranks
    row_of_token: IntArray  # int64 (T,), the number of each token's row; -1 for text

    def places(self, tokens: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns which of some pack tokens (t,) are of images and videos, and their rows, both int64. -1 is none."""
        numbers = rows_of(self.row_of_token, tokens)
        where = np.flatnonzero(numbers >= 0)
        row = np.zeros(self.wanted[-1] + 1 if len(self.wanted) else 0, np.int64)
        row[self.wanted] = np.arange(len(self.wanted))
        return to_device(where, self.rows.device), to_device(row[numbers[where]], self.rows.device)


def rows_wanted(row_of_token: IntArray, tokens: IntArray, total: int) -> IntArray:
    """Returns those of ``total`` rows that some pack tokens have, ascending, each once."""
    wanted = np.zeros(total + 1, np.bool_)
    wanted[rows_of(row_of_token, tokens)] = True  # -1 marks the entry beyond the rows
    return np.flatnonzero(wanted[:-1])


def _share(grids: IntArray, chosen: npt.NDArray[np.bool_]) -> Share:
    """Returns the share of the chosen runs from the grids of all that are on this rank; adjacent ones form a range."""
    lengths = grids.prod(1)
    ends = np.cumsum(lengths)
    found: list[tuple[int, int]] = []
    for end, length in zip(ends[chosen].tolist(), lengths[chosen].tolist(), strict=True):
        if found and found[-1][1] == end - length:
            found[-1] = (found[-1][0], end)
        else:
            found.append((end - length, end))
    return Share(tuple((t, h, w) for t, h, w in grids[chosen].tolist()), tuple(found), int(lengths.sum()))


def _check_held(batch: PackedBatch, items: PackItems, runs: ItemRuns) -> None:
    """Checks that a batch holds the patches of the images and videos that its rank encodes, which are these runs."""
    mine, are_videos, lengths = items.held(runs), items.are_videos[runs.items], runs.grids(items.grids).prod(1)
    patches, frames = batch.video_patches, 1
    if patches is not None or len(mine.videos):  # a pack without videos has no such tensors
        frames = batch.family.temporal_patch_size if patches is not None and patches.dtype == torch.uint8 else 1
        _require(batch, "video", patches, int(lengths[are_videos].sum()) * frames, batch.host.video_runs, mine.videos)
    _require(batch, "image", batch.patches, int(lengths[~are_videos].sum()), batch.host.image_indices, mine.images)


def _require(
    batch: PackedBatch, kind: str, patches: torch.Tensor | None, need: int, held: IntArray, mine: IntArray
) -> None:
    """Checks that a batch has so many rows of patches, of the images or parts of videos ``mine``."""
    if patches is None:
        raise ValueError(
            f"pack {batch.pack} has no pixels, which the first pipeline stage needs: load the part 'pixels'"
        )
    if patches.shape[0] != need:
        raise ValueError(
            f"pack {batch.pack} holds {patches.shape[0]} rows of {kind} patches, but the {len(mine)} {kind}s of this "
            f"rank have {need}"
        )
    if held.tolist() != mine.tolist():
        columns = " (number, first temporal patch, temporal patches)" if kind == "video" else ""
        raise ValueError(
            f"pack {batch.pack} holds the patches of {kind}s {held.tolist()}{columns}, but this rank encodes {kind}s "
            f"{mine.tolist()}: cut it with PackedBatch.context_parallel_shard or the loader"
        )
