"""A family that cuts images into tiles and adds a thumbnail, as InternVL does."""

from __future__ import annotations

from dataclasses import fields

from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas

from vlmdata.families import Family, View, qwen3_5

SIDE, MOST = 64, 6


class Tiled(Family):
    """Tiles of one size, which follow one another between one pair of marks."""

    def views(self, height: int, width: int, size: tuple[int, int]) -> tuple[View, ...]:
        columns, rows = get_optimal_tiled_canvas((height, width), (SIDE, SIDE), 1, MOST)
        whole = View((SIDE, SIDE))
        if rows * columns == 1:
            return (whole,)
        canvas = rows * SIDE, columns * SIDE
        tiles = (View(canvas, part=(SIDE * i, SIDE * j, SIDE, SIDE)) for i in range(rows) for j in range(columns))
        return (*tiles, whole)


_CHANGED = {"name": "tiled", "model_types": ("tiled",), "processors": (), "most_views": MOST + 1}
FAMILY = Tiled(**{each.name: getattr(qwen3_5.FAMILY, each.name) for each in fields(Family)} | _CHANGED)
