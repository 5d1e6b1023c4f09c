"""Where the items of a sample are in its tokens: as blocks, runs of placeholders with other tokens in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vlmdata.families.base import Family
from vlmdata.families.positions import locate_blocks

Grid = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of some items, in order.

    Attributes:
        grids: int64 (B, 3), patches of each block along t, h, w.
        counts: int64 (B,), placeholders of each block.
        tokens: int64 (B,), id of the placeholder of each block.
        steps: int64 (B,), step of the first axis of positions within each block.
        firsts: int64 (N,), number of the first block of each item.
        placeholders: Ids of the placeholders of all kinds.
    """

    grids: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int64]
    firsts: npt.NDArray[np.int64]
    placeholders: tuple[int, ...]

    @classmethod
    def of(
        cls,
        family: Family,
        items: Sequence[tuple[str, Grid]],
        tokens: Mapping[str, int],
        steps: Sequence[int] | None = None,
    ) -> Blocks:
        """Returns the blocks of items.

        Args:
            family: Tells how items become tokens.
            items: Kind and grid of each item.
            tokens: Id of the placeholder of each kind.
            steps: Of each item; None is 1.
        """
        of_items = [family.expansion(kind).blocks(grid) for kind, grid in items]
        numbers = np.array([len(blocks) for blocks in of_items], np.int64)
        grids = np.array([grid for blocks in of_items for grid in blocks], np.int64).reshape(-1, 3)
        ids = np.array([tokens[kind] for kind, _ in items], np.int64)
        each_step = np.ones(len(items), np.int64) if steps is None else np.array(steps, np.int64)
        return cls(
            grids=grids,
            counts=family.token_counts(grids),
            tokens=np.repeat(ids, numbers),
            steps=np.repeat(each_step, numbers),
            firsts=np.cumsum(numbers) - numbers,
            placeholders=tuple(tokens.values()),
        )

    def locate(self, input_ids: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Returns the index of the first token of each block, int64 (B,).

        Raises:
            ValueError: If the placeholders in ``input_ids`` (L,) are not exactly these blocks.
        """
        return locate_blocks(input_ids, self.counts, self.tokens, self.placeholders)
