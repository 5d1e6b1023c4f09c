"""A family of another kind than Qwen's, as an author would write it: turns, items, sizes and positions of Gemma 3.

Patches and images are smaller than Gemma's. The means differ between channels.
"""

from __future__ import annotations

from vlmdata.families.base import Family
from vlmdata.families.chat import ChatFormat, Expansion

SIDE = 72


class FixedSize(Family):
    """All images have one size."""

    def image_size(
        self, height: int, width: int, min_pixels: int, max_pixels: int, *, least_side: int = 0
    ) -> tuple[int, int]:
        return SIDE, SIDE


FAMILY = FixedSize(
    name="gemma_like",
    model_types=("gemma_like",),
    chat=ChatFormat(
        turn_start="<start_of_turn>",
        turn_end="<end_of_turn>",
        assistant_header="model\n",
        begin="<bos>",
        end_of_text="<eos>",
    ),
    items=(
        Expansion(
            "image",
            "<image_soft_token>",
            before=("<start_of_image>",),
            after=("<end_of_image>",),
            margin="\n\n",
            written="<start_of_image>",
        ),
    ),
    patch_size=8,
    merge_size=3,
    temporal_patch_size=1,
    image_mean=(0.4, 0.5, 0.6),
    image_std=(0.2, 0.3, 0.4),
    min_pixels=SIDE**2,
    max_pixels=SIDE**2,
    resample="bilinear",
    position_axes=("position",),
)
