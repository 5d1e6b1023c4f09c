"""Families whose tokens are not one per merged patch, as a user's file, and models that take their packs.

``one_more``: Qwen3.5 with one more placeholder after each image, and after each temporal patch of a video. ``rows``: a
break after each row of an image but the last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from vlmdata import PackedBatch
from vlmdata.families import Family, qwen3_5

BREAK = "<|vision_pad|>"
VOCABULARY = 6144


class OneMore(Family):
    """A token that sums up the others."""

    def token_counts(self, grid_thw: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        return super().token_counts(grid_thw) + 1


class Rows(Family):
    """Rows of placeholders with breaks between."""

    def token_counts(self, grid_thw: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        return super().token_counts(grid_thw) + np.asarray(grid_thw)[:, 1] // self.merge_size - 1

    def placeholders(self, kind: str, grid: tuple[int, int, int]) -> Sequence[str]:
        row = (self.expansion(kind).token,) * (grid[2] // self.merge_size)
        return (*row, *(BREAK, *row) * (grid[1] // self.merge_size - 1))


_FIELDS = {each.name: getattr(qwen3_5.FAMILY, each.name) for each in dataclasses.fields(Family)}
_ROWS = dataclasses.replace(qwen3_5.FAMILY.image, between=(BREAK,))
ONE_MORE = OneMore(**_FIELDS | {"name": "one_more", "model_types": ("one_more",), "processors": ()})
ROWS = Rows(
    **_FIELDS
    | {"name": "rows", "model_types": ("rows",), "processors": (), "items": (_ROWS,), "position_axes": ("position",)}
    | {"video": None, "other_video": ()}
)


class Model(torch.nn.Module):
    """Features of merged patches stand for placeholders; no token sees another."""

    def __init__(self, family: Family) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.extra = int(family.name == "one_more")
        self.embed = torch.nn.Embedding(VOCABULARY, 8)
        self.visual = torch.nn.Linear(family.temporal_patch_size * family.patch_bytes, 8)
        self.head = torch.nn.Linear(8, VOCABULARY)

    def features(self, values: torch.Tensor, grids: Sequence[Sequence[int]]) -> torch.Tensor:
        """A row per placeholder; a temporal patch of a video is a block of its own."""
        rows, found = self.visual(values).view(-1, 4, 8).mean(dim=1), [values.new_zeros(0, 8)]
        for t, h, w in grids:
            for _ in range(t):
                block, rows = rows[: h * w // 4], rows[h * w // 4 :]
                found += [block, block.mean(dim=0, keepdim=True).repeat(self.extra, 1)]
        return torch.cat(found)

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        assert batch.input_ids is not None
        ids, hidden = batch.input_ids[0], self.embed(batch.input_ids[0])
        image, video = 12, 13  # of the embedded tokenizer, counted from its first special token
        first = VOCABULARY - 26
        hidden = hidden.index_put(
            ((ids == first + image).nonzero().flatten(),),
            self.features(batch.pixel_values(torch.float32), batch.image_grid_thw.tolist()),
        )
        if len(batch.host.video_grid_thw):
            values = batch.pixel_values_videos(torch.float32)
            places = ((ids == first + video).nonzero().flatten(),)
            hidden = hidden.index_put(places, self.features(values, batch.video_grid_thw.tolist()))
        return self.head(hidden)[None]


def _built(family: Family) -> tuple[Model, Callable[[PackedBatch], dict[str, torch.Tensor]]]:
    model = Model(family)
    return model, lambda batch: {"logits": model(batch)}


def one_more() -> tuple[Model, Callable[[PackedBatch], dict[str, torch.Tensor]]]:
    return _built(ONE_MORE)


def rows() -> tuple[Model, Callable[[PackedBatch], dict[str, torch.Tensor]]]:
    return _built(ROWS)
