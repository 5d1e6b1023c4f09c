"""InternVL3 and InternVL3.5 (``-HF`` checkpoints): images cut into tiles of 448 pixels, each of 256 tokens.

Sources: ``InternVLProcessor`` and ``GotOcr2ImageProcessor`` of transformers, the published ``preprocessor_config.json``
and chat template of InternVL3.5-HF. A tile is an item with a grid of 32 x 32 patches; the tiles of an image and its
thumbnail stand together between one pair of marks. ``--min-pixels`` and ``--max-pixels`` bound the tiles without the
thumbnail; the defaults are the processor's 1 to 12. Positions are the order of tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from vlmdata.families import qwen
from vlmdata.families.base import Family, ImageBoundsError, View
from vlmdata.families.chat import IMAGE, Expansion
from vlmdata.families.grounding import Grounding

if TYPE_CHECKING:
    import torch

#: Side of a tile, and pixels of one.
SIDE = 448
TILE = SIDE**2
#: Most tiles of an image besides its thumbnail: the largest number that InternVL's authors evaluate with.
MOST_TILES = 40


@dataclass(frozen=True)
class InternVL(Family):
    """Dynamic tiling: the canvas of tiles whose aspect ratio is closest to the image's, and a thumbnail."""

    @property
    def smallest_image(self) -> int:
        """One tile."""
        return TILE

    @property
    def largest_image(self) -> int:
        """The largest canvas."""
        return MOST_TILES * TILE

    def image_size(
        self, height: int, width: int, min_pixels: int, max_pixels: float, *, least_side: int = 0
    ) -> tuple[int, int]:
        """Returns the (height, width) of the canvas: ``get_optimal_tiled_canvas`` of the processor.

        Args:
            height: Source height in pixels, positive.
            width: Source width in pixels, positive.
            min_pixels: Smallest canvas; part of a tile counts as one.
            max_pixels: Largest canvas; part of a tile does not count.
            least_side: Without meaning here.
        """
        ratio, area = width / height, width * height
        best, rows_and_columns = float("inf"), (1, 1)
        for rows, columns in _canvases(-(-min_pixels // TILE), max_pixels // TILE):
            difference = abs(ratio - columns / rows)
            # Of equal ratios, the larger canvas, if the image fills more than half of it.
            if difference < best or (difference == best and area > 0.5 * TILE * columns * rows):
                best, rows_and_columns = difference, (rows, columns)
        rows, columns = rows_and_columns
        return rows * SIDE, columns * SIDE

    def requested_size(self, height: int, width: int) -> tuple[int, int]:
        """Refuses such requests: the processor has none.

        Raises:
            ImageBoundsError: Always.
        """
        raise ImageBoundsError(
            f"resized_height {height} and resized_width {width} are not of the family {self.name}, which chooses tiles "
            f"of {SIDE}x{SIDE} pixels; drop them, or bound the tiles with max_pixels ({TILE:,} per tile)"
        )

    def require_bounds(self, min_pixels: int, max_pixels: int) -> None:
        """See :meth:`Family.require_bounds`."""
        least, most = -(-min_pixels // TILE), max_pixels // TILE
        if most > MOST_TILES:
            raise ImageBoundsError(
                f"max_pixels {max_pixels:,} allows {most} tiles of {SIDE}x{SIDE} pixels; the family {self.name} takes "
                f"at most {MOST_TILES}: {self.largest_image}"
            )
        if least > most:
            raise ImageBoundsError(
                f"min_pixels {min_pixels:,} needs {least} tiles of {SIDE}x{SIDE} pixels, and max_pixels {max_pixels:,} "
                f"allows {most}; give multiples of {TILE}"
            )

    def views(self, height: int, width: int, size: tuple[int, int]) -> tuple[View, ...]:
        """Returns the tiles in rows from the upper left, and the thumbnail; one tile shows the whole image alone."""
        rows, columns = size[0] // SIDE, size[1] // SIDE
        whole = View((SIDE, SIDE))
        if rows * columns == 1:
            return (whole,)
        places = ((row * SIDE, column * SIDE) for row in range(rows) for column in range(columns))
        return (*(View(size, part=(*place, SIDE, SIDE)) for place in places), whole)

    def image_inputs(self, values: torch.Tensor, grids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the tiles as ``pixel_values``: (tiles, 3, 448, 448)."""
        merged, merge, patch = SIDE // self.factor, self.merge_size, self.patch_size
        blocks = values.view(-1, merged, merged, merge, merge, 3, patch, patch)
        return {"pixel_values": blocks.permute(0, 5, 1, 3, 6, 2, 4, 7).reshape(-1, 3, SIDE, SIDE)}


@cache
def _canvases(least: int, most: int) -> tuple[tuple[int, int], ...]:
    """Returns the (rows, columns) of so many tiles, in the order in which the processor tries them."""
    sides = range(1, most + 1)
    found = [(rows, columns) for columns in sides for rows in sides if least <= rows * columns <= most]
    return tuple(sorted(found, key=lambda canvas: canvas[0] * canvas[1]))


#: Thousandths of the sides of the whole image. Sources: ``evaluate_grounding.py`` and the demo of OpenGVLab/InternVL.
#: Neither has points, nor boxes as JSON.
GROUNDING = Grounding(
    scale=1000,
    box_key="",
    point_key="",
    box_marks=("<box>", "</box>"),
    label_marks=("<ref>", "</ref>"),
    lists=True,
)
FAMILY = InternVL(
    name="internvl",
    model_types=("internvl",),
    chat=replace(qwen.CHATML, markup=("ref", "box", "quad")),
    items=(Expansion(IMAGE, "<IMG_CONTEXT>", before=("<img>",), after=("</img>",), written="<IMG_CONTEXT>"),),
    patch_size=14,
    merge_size=2,
    temporal_patch_size=1,
    image_mean=(0.485, 0.456, 0.406),
    image_std=(0.229, 0.224, 0.225),
    min_pixels=TILE,
    max_pixels=12 * TILE,
    max_aspect_ratio=math.inf,
    most_views=MOST_TILES + 1,
    position_axes=("position",),
    processors=("InternVLProcessor",),
    grounding=GROUNDING,
    token_settings=(
        ("<IMG_CONTEXT>", "context_image_token"),
        ("<img>", "start_image_token"),
        ("</img>", "end_image_token"),
    ),
)
