"""Gemma 4: its own turns, images scaled to a budget of 70 to 1,120 tokens, 3 x 3 patches of 16 pixels per token.

Sources: ``Gemma4Processor`` and ``Gemma4ImageProcessor`` of transformers, and the published chat template. The budget
is ``--max-pixels``, 48 x 48 pixels per token; each image is scaled to fill it, so there is no smallest size. Positions
of tokens are their order. Patches are stored row by row, as the processor has them, which also tells the column and row
of each (``image_position_ids``). The tokens of an image stand between two marks of its own, so those of different
images never touch: in models with ``use_bidirectional_attention: vision`` they see each other in both directions, in
the layers with a sliding window. A call of a tool, the tool's response and the next answer are one turn: the model ends
the call with the token that begins the response (``eos_token_id`` of the published ``generation_config.json``), and
goes on after the response.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vlmdata.families.base import CHANNELS, Family, ImageBoundsError
from vlmdata.families.chat import IMAGE, ChatFormat, Expansion
from vlmdata.families.patches import patchify, unpatchify

if TYPE_CHECKING:
    import torch

#: Tokens of an image that the processor takes as ``max_soft_tokens``, and pixels of one.
BUDGETS = (70, 140, 280, 560, 1_120)
TOKEN = 48**2


@dataclass(frozen=True)
class Gemma4(Family):
    """Images that fill a budget of tokens, and values that are scaled and not normalised."""

    @property
    def smallest_image(self) -> int:
        """The smallest budget."""
        return BUDGETS[0] * TOKEN

    @property
    def largest_image(self) -> int:
        """The largest budget."""
        return BUDGETS[-1] * TOKEN

    def image_size(
        self, height: int, width: int, min_pixels: int, max_pixels: float, *, least_side: int = 0
    ) -> tuple[int, int]:
        """Returns the largest (height, width) within the budget: ``get_aspect_ratio_preserving_size`` of the processor.

        Args:
            height: Source height in pixels, positive.
            width: Source width in pixels, positive.
            min_pixels: Without meaning here.
            max_pixels: The budget.
            least_side: Without meaning here.
        """
        scale, side = math.sqrt(max_pixels / (height * width)), self.factor
        rows, columns = math.floor(scale * height / side), math.floor(scale * width / side)
        most = int(max_pixels) // TOKEN  # tokens of an image one token wide
        if rows == 0:
            rows, columns = 1, min(math.floor(width / height), most)
        elif columns == 0:
            rows, columns = min(math.floor(height / width), most), 1
        return rows * side, columns * side

    def requested_size(self, height: int, width: int) -> tuple[int, int]:
        """Refuses such requests: the processor has none.

        Raises:
            ImageBoundsError: Always.
        """
        raise ImageBoundsError(
            f"resized_height {height} and resized_width {width} are not of the family {self.name}, which scales images "
            f"to a budget; drop them, or give the budget as max_pixels: {self._budgets()}"
        )

    def require_bounds(self, min_pixels: int, max_pixels: int) -> None:
        """See :meth:`Family.require_bounds`."""
        if max_pixels not in (budget * TOKEN for budget in BUDGETS):
            raise ImageBoundsError(
                f"max_pixels is {max_pixels}; the budgets of family {self.name} are {self._budgets()}"
            )
        if min_pixels != self.min_pixels:
            raise ImageBoundsError(
                f"min_pixels is {min_pixels}, without effect in family {self.name}, which scales each image to its "
                "budget, max_pixels; drop it"
            )

    def _budgets(self) -> str:
        """The values of max_pixels."""
        return ", ".join(f"{budget * TOKEN} ({budget:,} tokens)" for budget in BUDGETS)

    def patchify(self, image: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8] | None = None) -> npt.NDArray[np.uint8]:
        """Cuts an image into patches, row by row."""
        return patchify(image, self.patch_size, 1, out)

    def unpatchify(self, patches: npt.NDArray[np.uint8], grid_h: int, grid_w: int) -> npt.NDArray[np.uint8]:
        """Joins patches to an image."""
        return unpatchify(patches, grid_h, grid_w, self.patch_size, 1)

    def pixel_values(
        self,
        patches: torch.Tensor,
        dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
        copies: int = 1,
    ) -> torch.Tensor:
        """Returns values from 0 to 1, columns (C, patch, patch); see :meth:`Family.pixel_values`."""
        import torch

        if out is None:
            out = torch.empty(patches.shape, dtype=dtype or torch.float32, device=patches.device)
        # As the processor: a product with the reciprocal in float32, rounded to other types after it.
        return out.copy_(patches.float().mul_(1 / 255))

    def image_inputs(self, values: torch.Tensor, grids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the images with their patches padded to the largest of them.

        Returns:
            ``pixel_values``: (N, patches, 768), columns (patch, patch, C), 0 where padded. ``image_position_ids``:
            int64 (N, patches, 2), column and row of each, -1 where padded. The processor pads to the budget.
        """
        import torch
        from torch.nn.utils.rnn import pad_sequence

        side = self.patch_size
        pixels = values.view(-1, CHANNELS, side, side).permute(0, 2, 3, 1).reshape(values.shape)
        sizes = grids[:, 1:].tolist()
        if not sizes:
            return {
                "pixel_values": pixels.view(0, 0, pixels.shape[1]),
                "image_position_ids": torch.zeros(0, 0, 2, dtype=torch.int64, device=values.device),
            }
        places = [
            torch.cartesian_prod(torch.arange(rows, device=values.device), torch.arange(columns, device=values.device))
            for rows, columns in sizes
        ]
        return {
            "pixel_values": pad_sequence(list(torch.split(pixels, [len(each) for each in places])), batch_first=True),
            "image_position_ids": pad_sequence([each.flip(1) for each in places], batch_first=True, padding_value=-1),
        }


FAMILY = Gemma4(
    name="gemma4",
    model_types=("gemma4",),
    chat=ChatFormat(
        turn_start="<|turn>",
        turn_end="<turn|>",
        assistant_header="model\n",
        think=("<|channel>thought\n", "\n<channel|>"),
        begin="<bos>",
        end_of_text="<eos>",
        tool_response=("<|tool_response>", "<tool_response|>"),
    ),
    items=(Expansion(IMAGE, "<|image|>", before=("<|image>",), after=("<image|>",), written="<|image|>"),),
    patch_size=16,
    merge_size=3,
    temporal_patch_size=1,
    image_mean=(0.0, 0.0, 0.0),
    image_std=(1.0, 1.0, 1.0),
    min_pixels=BUDGETS[0] * TOKEN,
    max_pixels=280 * TOKEN,
    max_aspect_ratio=math.inf,
    position_axes=("position",),
    processors=("Gemma4Processor",),
    token_settings=(("<|image|>", "image_token"), ("<|image>", "boi_token"), ("<image|>", "eoi_token")),
)
