"""Which rank encodes which images of a pack, and where their embeddings go, from what every rank knows.

Shapes: tokens of the pack T, tokens on this rank t, images N, embedding rows on this rank m.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from model.parallel.packed import IntArray, to_device
from vlmdata.batch import PackedBatch
from vlmdata.packing.image_owners import image_owners


@dataclass(frozen=True)
class ImageRows:
    """Destinations of the merged image embeddings of a pack.

    Context-parallel ranks hold different images. If the tower is not tensor parallel, the ranks of a tensor-parallel
    group hold the same images and encode different parts of them.
    """

    counts: tuple[int, ...]  # embedding rows of each context-parallel rank's images, in rank order
    part_counts: tuple[int, ...]  # embedding rows that each part of this context-parallel rank computes
    grids: tuple[tuple[int, int, int], ...]  # grids of the images that this rank encodes, in order, on the host
    #: Half-open ranges of those images' patches among the patches on this rank, in order.
    held: tuple[tuple[int, int], ...]
    #: int64 (T,), for each token of the pack its row among the embeddings of all ranks; -1 for text.
    row_of_token: IntArray
    context_rank: int  # this rank

    @classmethod
    def of(
        cls, batch: PackedBatch, merge_unit: int, context_size: int, context_rank: int, parts: int = 1, part: int = 0
    ) -> ImageRows:
        """Computes the rows from the grids of the whole pack, which are equal on all ranks.

        ``batch`` is that of this context-parallel rank. Several ``parts`` encode a context-parallel rank's images;
        ``part`` is that of this rank. An embedding row has ``merge_unit`` patches. A ValueError if an image extends
        beyond the pack, or the patches do not match the grids.
        """
        grids, starts = batch.host.image_grid_thw.reshape(-1, 3), batch.host.image_starts
        owners = image_owners(grids, context_size)
        rows = grids.prod(1) // merge_unit
        here = owners == context_rank
        _check_images(batch, grids, starts, rows, here)
        part_of = np.zeros(len(grids), np.int64)
        for rank in range(context_size if parts > 1 else 0):
            part_of[owners == rank] = image_owners(grids[owners == rank], parts)
        # Rows of all ranks are ordered by rank, then by part, then by image in pack order.
        order = np.lexsort((np.arange(len(grids)), part_of, owners))
        first_row = np.empty(len(grids), np.int64)
        first_row[order] = np.cumsum(rows[order]) - rows[order]
        row_of_token = rows_of_tokens(batch.total_tokens, starts, first_row, rows)
        counts = np.bincount(owners, weights=rows, minlength=context_size).astype(np.int64)
        part_counts = np.bincount(part_of[here], weights=rows[here], minlength=parts).astype(np.int64)
        mine = [(int(t), int(h), int(w)) for t, h, w in grids[here & (part_of == part)]]
        held = _ranges(grids[here].prod(1), part_of[here] == part)
        return cls(tuple(counts.tolist()), tuple(part_counts.tolist()), tuple(mine), held, row_of_token, context_rank)

    def patches_of(self, patches: torch.Tensor) -> torch.Tensor:
        """Selects from this rank's patches (P, ...) those of the images that it encodes."""
        if self.held == ((0, patches.shape[0]),):
            return patches
        return torch.cat([patches[start:end] for start, end in self.held]) if self.held else patches[:0]

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
    """How image embeddings travel between context-parallel ranks: each rank gets the rows of its own tokens."""

    outgoing: IntArray  # int64, rows among those that this rank computed, in the order of their destinations
    sent: tuple[int, ...]  # number of rows for each rank
    received: tuple[int, ...]  # number of rows from each rank
    wanted: IntArray  # int64 (m,), ascending rows among those of all ranks that this rank gets


@dataclass(frozen=True)
class ImageEmbeddings:
    """Embeddings of the image tokens that a rank needs."""

    rows: torch.Tensor  # (m, (1 + D) * hidden), as the tower returns them
    wanted: IntArray  # int64 (m,), their ascending numbers among the rows of all ranks
    row_of_token: IntArray  # int64 (T,), the number of each token's row; -1 for text

    def places(self, tokens: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns which of some pack tokens (t,) are image tokens, and their rows, both int64. Token -1 is none."""
        numbers = _rows_of(self.row_of_token, tokens)
        where = np.flatnonzero(numbers >= 0)
        row = np.zeros(self.wanted[-1] + 1 if len(self.wanted) else 0, np.int64)
        row[self.wanted] = np.arange(len(self.wanted))
        return to_device(where, self.rows.device), to_device(row[numbers[where]], self.rows.device)


def rows_of_tokens(total: int, starts: IntArray, firsts: IntArray, counts: IntArray) -> IntArray:
    """Returns the row of each of a pack's ``total`` tokens, int64; -1 for text.

    Each image has ``counts`` tokens, from the token ``starts`` and the row ``firsts`` on.
    """
    found = np.full(total, -1, np.int64)
    for start, first, count in zip(starts.tolist(), firsts.tolist(), counts.tolist(), strict=True):
        found[start : start + count] = np.arange(first, first + count)
    return found


def rows_wanted(row_of_token: IntArray, tokens: IntArray, total: int) -> IntArray:
    """Returns those of ``total`` rows that some pack tokens have, ascending, each once."""
    wanted = np.zeros(total + 1, np.bool_)
    wanted[_rows_of(row_of_token, tokens)] = True  # -1 marks the entry beyond the rows
    return np.flatnonzero(wanted[:-1])


def _rows_of(row_of_token: IntArray, tokens: IntArray) -> IntArray:
    """Returns the embedding row of each pack token, -1 for text and for token -1."""
    return np.where(tokens >= 0, row_of_token[tokens], -1)


def image_tokens(batch: PackedBatch, merge_unit: int, tokens: IntArray) -> IntArray:
    """Returns which of the given pack tokens are image tokens: indices into ``tokens``, int64 ascending.

    Unlike :class:`ImageRows` it needs no pixels, so every pipeline stage can tell.
    """
    starts, counts = batch.host.image_starts, batch.host.image_grid_thw.reshape(-1, 3).prod(1) // merge_unit
    return np.flatnonzero(rows_of_tokens(batch.total_tokens, starts, np.zeros_like(starts), counts)[tokens] >= 0)


def _ranges(lengths: IntArray, chosen: npt.NDArray[np.bool_]) -> tuple[tuple[int, int], ...]:
    """Returns the ranges of the chosen blocks in a sequence of blocks; adjacent blocks form one range."""
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
            f"pack {batch.pack} has no pixels, which the first pipeline stage needs: load the part 'pixels'"
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
