"""Which image rows of a micro-batch go from which rank of the tower to which rank of the language model.

Everything follows from the plan, so nothing is negotiated. Rows of a micro-batch are numbered by the data-parallel rank
of the tower that computes them, then by pack, then by image. Tensor-parallel ranks of the tower each send an equal part
of their rows, and those of the language model each receive one and gather them.

Shapes: tokens of a pack T, rows of a micro-batch R, images of a pack N.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from model.parallel.image_rows import rows_of_tokens, rows_wanted
from model.parallel.packed import IntArray, PackIndex
from model.parallel.separation import Separation
from vlmdata.loader.request.pack_request import PackImages


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
    row_of_token: tuple[IntArray, ...]  # for each pack int64 (T,): the row of each token; -1 for text
    bounds: IntArray  # int64 (vision ranks + 1,): rank v of the tower sends rows [bounds[v], bounds[v + 1])
    ranks: Separation
    following: bool  # whether a rank also needs the rows of the tokens that follow its own (multi-token prediction)

    @classmethod
    def of(cls, packs: Sequence[PackImages], ranks: Separation, merge_unit: int, following: bool) -> MicroBatchRows:
        """Numbers the rows of packs, of ``merge_unit`` patches each; for ``following`` see the class."""
        counts = np.concatenate([each.image_grid_thw.prod(1) // merge_unit for each in packs])
        owners = np.concatenate([each.owners for each in packs])
        order = np.argsort(owners, kind="stable")
        first = np.empty(len(counts), np.int64)
        first[order] = np.cumsum(counts[order]) - counts[order]
        ends = np.cumsum([len(each.image_starts) for each in packs])[:-1]
        row_of_token = [
            rows_of_tokens(int(pack.cu_seqlens_padded[-1]), pack.image_starts, *of_pack)
            for pack, *of_pack in zip(packs, np.split(first, ends), np.split(counts, ends), strict=True)
        ]
        of_replica = np.bincount(owners, weights=counts, minlength=ranks.replicas).astype(np.int64)
        parts = [part for rows in of_replica.tolist() for part in even_parts(rows, ranks.vision_tensor)]
        return cls(packs, tuple(row_of_token), np.cumsum([0, *parts]), ranks, following)

    def wanted(self, data: int, context: int) -> IntArray:
        """Returns the rows that a context-parallel rank of the language model places, ascending, each once."""
        pack = self.packs[data]
        index = PackIndex.of_boundaries(pack.cu_seqlens, pack.cu_seqlens_padded, self.ranks.context, context)
        tokens = np.concatenate([index.local, index.following]) if self.following else index.local
        return rows_wanted(self.row_of_token[data], tokens, int(self.bounds[-1]))

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
