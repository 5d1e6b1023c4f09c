"""Where the tokens of a pack's images and videos are: as blocks, runs of placeholders.

An image is one block. A video is one block per temporal patch in families that tell its time before it.
Shapes: tokens of the pack T, items (images and videos) N, their blocks B.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vlmdata.batch import PackedBatch, PackItems
from vlmdata.families.chat import VIDEO
from vlmdata.model.parallel.packed import IntArray
from vlmdata.packing.item_runs import ItemRuns


@dataclass(frozen=True, eq=False)
class ItemBlocks:
    """The blocks of a pack. They need no pixels, so every pipeline stage knows them."""

    items: PackItems  # in order of their tokens
    rows: IntArray  # int64 (N,), tokens of each item, and rows of embeddings
    starts: IntArray  # int64 (B,), first token of each block in the pack, item by item
    counts: IntArray  # int64 (B,), tokens of each block
    owners: IntArray  # int64 (B,), the item of each block
    total: int  # T

    @classmethod
    def of(cls, batch: PackedBatch, merge_unit: int) -> ItemBlocks:
        """Returns the blocks of a batch's whole pack; a token has ``merge_unit`` patches.

        Raises:
            ValueError: If a block extends beyond the pack, or the blocks are not those of the grids.
        """
        items = batch.host.items
        rows = items.grids.prod(1) // merge_unit
        starts, counts, owners = items.starts, rows, np.arange(len(rows))
        if items.are_videos.any():
            blocks = batch.family.expansion(VIDEO).blocks
            of_videos = [blocks((t, h, w)) for t, h, w in items.grids[items.are_videos].tolist()]
            numbers = np.ones(len(rows), np.int64)
            numbers[items.are_videos] = [len(each) for each in of_videos]
            owners = np.repeat(owners, numbers)
            of_video = items.are_videos[owners]
            if len(batch.host.video_block_starts) != of_video.sum():
                raise ValueError(
                    f"pack {batch.pack} has the starts of {len(batch.host.video_block_starts)} blocks of videos, but "
                    f"the grids of its videos have {of_video.sum()} blocks"
                )
            starts, counts = starts[owners], counts[owners]
            starts[of_video] = batch.host.video_block_starts
            counts[of_video] = [np.prod(grid) // merge_unit for grids in of_videos for grid in grids]
        outside = np.flatnonzero((starts < 0) | (starts + counts > batch.total_tokens))
        if outside.size:
            at = int(outside[0])
            item = int(owners[at])
            kind = "video" if items.are_videos[item] else "image"
            raise ValueError(
                f"{kind} {items.numbers[item]} of pack {batch.pack} spans tokens {starts[at]} to "
                f"{starts[at] + counts[at]}, outside the pack's {batch.total_tokens}"
            )
        return cls(items, rows, starts, counts, owners, batch.total_tokens)

    def spread(self, firsts: IntArray) -> IntArray:
        """Returns the row of each token, int64 (T,); -1 for text. Rows of an item begin at ``firsts``, int64 (N,)."""
        before = np.cumsum(self.counts) - self.counts  # tokens of all blocks before each
        of_items = np.cumsum(self.rows) - self.rows  # tokens of all items before each
        return rows_of_tokens(self.total, self.starts, (firsts - of_items)[self.owners] + before, self.counts)

    def spread_runs(self, runs: ItemRuns, firsts: IntArray) -> IntArray:
        """Returns the row of each token as :meth:`spread`, where rows of a run begin at ``firsts``, int64 (R,).

        The runs hold each temporal patch of the items once.
        """
        order = np.lexsort((runs.begins, runs.items))
        counts = runs.rows(self.items.grids, self.rows)[order]
        ends = np.cumsum(counts)
        # In order, the runs are the rows of all items, one after another; -1 is the entry for text.
        row = np.append(np.arange(int(counts.sum())) + np.repeat(firsts[order] - (ends - counts), counts), -1)
        return row[self.spread(np.cumsum(self.rows) - self.rows)]

    def are_of(self, videos: bool) -> npt.NDArray[np.bool_]:
        """Returns which tokens are placeholders of images, or of videos, bool (T,)."""
        chosen = self.items.are_videos[self.owners] == videos
        starts, counts = self.starts[chosen], self.counts[chosen]
        return rows_of_tokens(self.total, starts, np.zeros_like(starts), counts) >= 0

    def among(self, tokens: IntArray) -> IntArray:
        """Returns which of some pack tokens are placeholders: indices into ``tokens``, int64 ascending."""
        return np.flatnonzero(self.spread(np.zeros_like(self.rows))[tokens] >= 0)


def rows_of_tokens(total: int, starts: IntArray, firsts: IntArray, counts: IntArray) -> IntArray:
    """Returns the row of each of a pack's ``total`` tokens, int64; -1 for text.

    Each block has ``counts`` tokens, from the token ``starts`` and the row ``firsts`` on.
    """
    found = np.full(total, -1, np.int64)
    for start, first, count in zip(starts.tolist(), firsts.tolist(), counts.tolist(), strict=True):
        found[start : start + count] = np.arange(first, first + count)
    return found


def rows_of(row_of_token: IntArray, tokens: IntArray) -> IntArray:
    """Returns the embedding row of each pack token, -1 for text and for token -1."""
    return np.where(tokens >= 0, row_of_token[tokens], -1)
