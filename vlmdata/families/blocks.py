"""Where the items of a sample are in its tokens: as blocks, runs of placeholders with text in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from vlmdata.families.base import Family
from vlmdata.families.positions import locate_blocks
from vlmdata.families.processor import ProcessorFamily

Grid = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of some items, in order.

    Attributes:
        grids: int64 (B, 3), patches of each block along t, h, w.
        counts: int64 (B,), tokens of each block.
        tokens: int64 (B,), id of the placeholder of each block.
        ids: int64 (sum of ``counts``,), the tokens of all blocks, one after another.
        steps: (B,), step of the first axis of positions within each block: int64, or float64 if one is a float.
        firsts: int64 (N,), number of the first block of each item.
        placeholders: Ids of the placeholders of all kinds, and of the tokens between them; empty if only the model's
            processor knows them.
    """

    grids: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]
    steps: npt.NDArray[np.number]
    firsts: npt.NDArray[np.int64]
    placeholders: tuple[int, ...]

    @classmethod
    def of(
        cls,
        family: Family,
        items: Sequence[tuple[str, Grid]],
        tokens: Mapping[str, tuple[int, ...]],
        steps: Sequence[float] | None = None,
    ) -> Blocks:
        """Returns the blocks of items.

        Args:
            family: Tells how items become tokens.
            items: Kind and grid of each item.
            tokens: Ids of the placeholder of each kind and of the tokens between.
            steps: Of each item; None is 1.

        Raises:
            ValueError: If rules of the family contradict each other.
        """
        of_items = [family.expansion(kind).blocks(grid) for kind, grid in items]
        numbers = np.array([len(blocks) for blocks in of_items], np.int64)
        if isinstance(family, ProcessorFamily):
            return cls._untold([grid for blocks in of_items for grid in blocks])
        grids = np.array([grid for blocks in of_items for grid in blocks], np.int64).reshape(-1, 3)
        placeholders = np.repeat(np.array([tokens[kind][0] for kind, _ in items], np.int64), numbers)
        counts = family.token_counts(grids)
        ids = np.repeat(placeholders, counts)
        if any(len(each) > 1 for each in tokens.values()):
            kinds = [kind for (kind, _), number in zip(items, numbers.tolist(), strict=True) for _ in range(number)]
            of_blocks = [
                _ids_of(family, kind, (t, h, w), count, tokens[kind])
                for kind, (t, h, w), count in zip(kinds, grids.tolist(), counts.tolist(), strict=True)
            ]
            ids = np.concatenate([ids[:0], *of_blocks])
        each_step = np.ones(len(items), np.int64) if steps is None else np.array(steps)
        return cls(
            grids=grids,
            counts=counts,
            tokens=placeholders,
            ids=ids,
            steps=np.repeat(each_step, numbers),
            firsts=np.cumsum(numbers) - numbers,
            placeholders=tuple(chain.from_iterable(tokens.values())),
        )

    @classmethod
    def _untold(cls, grids: Sequence[Grid]) -> Blocks:
        """Returns blocks of no tokens, of items whose tokens only the model's processor knows."""
        none, blocks = np.zeros(0, np.int64), len(grids)
        return cls(
            grids=np.array(grids, np.int64).reshape(-1, 3),
            counts=np.zeros(blocks, np.int64),
            tokens=np.full(blocks, -1, np.int64),
            ids=none,
            steps=np.ones(blocks, np.int64),
            firsts=np.arange(blocks),
            placeholders=(),
        )

    def locate(self, input_ids: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Returns the index of the first token of each block, int64 (B,); 0 if only the processor knows them.

        Raises:
            ValueError: If the placeholders in ``input_ids`` (L,) are not exactly these blocks.
        """
        if not self.placeholders:
            return np.zeros(len(self.counts), np.int64)
        return locate_blocks(input_ids, self.counts, self.ids, self.placeholders)


def are_placeholders(family: Family, kind: str, grid: Grid) -> npt.NDArray[np.bool_]:
    """Returns which tokens of a block are placeholders, not tokens between them, bool (count,).

    The model has features of the block for these.
    """
    expansion = family.expansion(kind)
    if not expansion.between:
        return np.ones(int(family.token_counts(np.array([grid]))[0]), np.bool_)
    return np.array([text == expansion.token for text in family.placeholders(kind, grid)], np.bool_)


def _ids_of(family: Family, kind: str, grid: Grid, count: int, ids: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Returns the tokens of a block from the ids of its placeholder and of the tokens between."""
    expansion, texts = family.expansion(kind), family.placeholders(kind, grid)
    known = dict(zip((expansion.token, *expansion.between), ids, strict=True))
    if unknown := set(texts) - set(known):
        raise ValueError(
            f"family {family.name}: its placeholders have {min(unknown)!r}; write it in the `between` of its Expansion"
        )
    if len(texts) != count:
        raise ValueError(
            f"family {family.name}: it has {len(texts)} placeholders for {kind}s of {list(grid)} patches, but its "
            f"token_counts is {count}; both must be equal"
        )
    return np.array([known[text] for text in texts], np.int64)
