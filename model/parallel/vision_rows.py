"""Which rows of a micro-batch's images and videos go from a rank of the tower to a rank of the language model.

Everything follows from the plan, so nothing is negotiated. Rows of a micro-batch are numbered by the data-parallel rank
of the tower that computes them, then as the tower takes them: images before videos, by pack and by place in it.
Tensor-parallel ranks of the tower each send an equal part of their rows, and those of the language model each receive
one and gather them.

A context-parallel rank of the language model gets the rows of its own image tokens, and all rows of its pack's videos:
the plan comes from the index, which does not say where the blocks of a video are after the first one.

Shapes: tokens of a pack T, images and videos of a pack N, runs of their temporal patches R.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vlmdata.loader.request.pack_request import PackImages
from vlmdata.model.parallel.embedding_rows import rows_wanted
from vlmdata.model.parallel.item_blocks import ItemBlocks, rows_of_tokens
from vlmdata.model.parallel.packed import IntArray, PackIndex
from vlmdata.model.parallel.separation import Separation


@dataclass(frozen=True)
class Transfer:
    """One rank's part of an exchange."""

    #: int64, on a rank of the tower the rows to send, in the order of their destinations, as numbers among those that
    #: it computes; empty on others.
    outgoing: IntArray
    sent: tuple[int, ...]  # rows for each rank of the group
    received: tuple[int, ...]  # rows from each rank of the group


@dataclass(frozen=True)
class MicroBatchRows:
    """The rows of a micro-batch."""

    packs: Sequence[PackImages]  # the packs of the data-parallel ranks of the language model
    firsts: tuple[IntArray, ...]  # for each pack int64 (R,): the first row of each of its runs
    counts: tuple[IntArray, ...]  # for each pack int64 (R,): their number of rows
    bounds: IntArray  # int64 (vision ranks + 1,): rank v of the tower sends rows [bounds[v], bounds[v + 1])
    ranks: Separation
    following: bool  # whether a rank also needs the rows of the tokens that follow its own (multi-token prediction)

    @classmethod
    def of(cls, packs: Sequence[PackImages], ranks: Separation, merge_unit: int, following: bool) -> MicroBatchRows:
        """Numbers the rows of packs, of ``merge_unit`` patches each; for ``following`` see the class."""
        counts = np.concatenate([each.runs.grids(each.grids).prod(1) // merge_unit for each in packs])
        owners = np.concatenate([each.runs.owners for each in packs])
        order = np.lexsort((np.concatenate([each.are_videos[each.runs.items] for each in packs]), owners))
        first = np.empty(len(counts), np.int64)
        first[order] = np.cumsum(counts[order]) - counts[order]
        ends = np.cumsum([len(each.runs.items) for each in packs])[:-1]
        of_replica = np.bincount(owners, weights=counts, minlength=ranks.replicas).astype(np.int64)
        parts = [part for rows in of_replica.tolist() for part in even_parts(rows, ranks.vision_tensor)]
        of_packs = tuple(np.split(first, ends)), tuple(np.split(counts, ends))
        return cls(packs, *of_packs, np.cumsum([0, *parts]), ranks, following)

    def wanted(self, data: int, context: int) -> IntArray:
        """Returns the rows that a context-parallel rank of the language model places, ascending, each once."""
        pack = self.packs[data]
        index = PackIndex.of_boundaries(pack.cu_seqlens, pack.cu_seqlens_padded, self.ranks.context, context)
        tokens = np.concatenate([index.local, index.following]) if self.following else index.local
        total, firsts, counts = int(self.bounds[-1]), self.firsts[data], self.counts[data]
        of_videos = pack.are_videos[pack.runs.items]
        of_images = ~of_videos  # each is one run
        row_of_token = rows_of_tokens(
            int(pack.cu_seqlens_padded[-1]),
            pack.starts[pack.runs.items[of_images]],
            firsts[of_images],
            counts[of_images],
        )
        rows = [rows_wanted(row_of_token, tokens, total)]
        rows += [
            np.arange(a, a + n) for a, n in zip(firsts[of_videos].tolist(), counts[of_videos].tolist(), strict=True)
        ]
        return np.sort(np.concatenate(rows)) if len(rows) > 1 else rows[0]

    def row_of_token(self, data: int, blocks: ItemBlocks) -> IntArray:
        """Returns the row of each token of a pack, int64 (T,), -1 for text; ``blocks`` are those of the pack."""
        return blocks.spread_runs(self.packs[data].runs, self.firsts[data])

    def part(self, wanted: IntArray, tensor: int) -> IntArray:
        """Returns the part of a rank's wanted rows that its tensor-parallel rank receives."""
        ends = np.cumsum([0, *even_parts(len(wanted), self.ranks.tensor)])
        return wanted[ends[tensor] : ends[tensor + 1]]

    def to_send(self, rank: int) -> Transfer:
        """Returns the part of a rank of the tower."""
        begin, end = self.bounds[rank], self.bounds[rank + 1]
        first = self.bounds[rank - rank % self.ranks.vision_tensor]
        pieces = []
        for data in range(self.ranks.data):
            for context in range(self.ranks.context):
                wanted = self.wanted(data, context)
                for tensor in range(self.ranks.tensor):
                    rows = self.part(wanted, tensor)
                    pieces.append(rows[np.searchsorted(rows, begin) : np.searchsorted(rows, end)] - first)
        nothing = (0,) * self.ranks.vision
        return Transfer(np.concatenate(pieces), (*nothing, *map(len, pieces)), (0,) * len(self.ranks.exchanging))

    def to_receive(self, rank: int) -> Transfer:
        """Returns the part of a rank of the language model's first stage."""
        data, context, tensor = self.ranks.place(rank)
        cuts = np.searchsorted(self.part(self.wanted(data, context), tensor), self.bounds)
        group = len(self.ranks.exchanging)
        received = (*np.diff(cuts).tolist(), *(0,) * (group - self.ranks.vision))
        return Transfer(np.zeros(0, np.int64), (0,) * group, received)


def even_parts(total: int, parts: int) -> list[int]:
    """Returns the sizes of nearly equal parts, larger ones first."""
    return [total // parts + (number < total % parts) for number in range(parts)]
