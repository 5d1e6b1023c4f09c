"""What transformers says of each family: its image processor, its position code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from PIL import Image

#: Family of Qwen -> (model, config) in transformers, and keyword arguments of the published image processor.
_HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5.modeling_qwen3_5:Qwen3_5Model", "Qwen3_5Config", {"patch_size": 16, **_HALF}),
    "qwen3_vl": ("qwen3_vl.modeling_qwen3_vl:Qwen3VLModel", "Qwen3VLConfig", {"patch_size": 16, **_HALF}),
    "qwen2_5_vl": ("qwen2_5_vl.modeling_qwen2_5_vl:Qwen2_5_VLModel", "Qwen2_5_VLConfig", {"patch_size": 14}),
}


def image_processor(name: str, min_pixels: int, max_pixels: int) -> Any:
    """The torchvision image processor of a family of Qwen."""
    from transformers import Qwen2VLImageProcessor

    made = Qwen2VLImageProcessor(**FAMILIES[name][2], size={"shortest_edge": min_pixels, "longest_edge": max_pixels})
    assert made.backend == "torchvision"
    return made


def rope_index(
    name: str,
    input_ids: torch.Tensor,
    types: torch.Tensor,
    grids: torch.Tensor | None,
    videos: torch.Tensor | None = None,
    seconds_per_patch: torch.Tensor | None = None,
) -> torch.Tensor:
    """``get_rope_index`` of a family's model without weights: int64 (3, 1, L).

    Args:
        name: The family.
        input_ids: int64 (1, L).
        types: int64 (1, L), 1 on image placeholders, 2 on those of videos.
        grids: int64 (N, 3), of the images, or None.
        videos: int64 (V, 3), grids of the videos, or None.
        seconds_per_patch: (V,), ``second_per_grid_ts`` of the videos; used by Qwen2.5-VL.
    """
    from importlib import import_module

    import transformers

    path, config, _ = FAMILIES[name]
    module, _, attribute = path.partition(":")
    kind = getattr(import_module(f"transformers.models.{module}"), attribute)
    model = kind.__new__(kind)
    torch.nn.Module.__init__(model)
    model.config = getattr(transformers, config)()
    more: dict[str, torch.Tensor] = {}
    if name == "qwen2_5_vl":
        model.config.vision_config.tokens_per_second = 2  # as in published checkpoints
        more = {} if seconds_per_patch is None else {"second_per_grid_ts": seconds_per_patch}
    positions: torch.Tensor = model.get_rope_index(input_ids, types, grids, videos, **more)[0]
    return positions


def internvl_images(max_tiles: int = 12, min_tiles: int = 1) -> Any:
    """The published image processor of InternVL3.5, with other bounds of tiles."""
    from transformers.models.got_ocr2.image_processing_got_ocr2 import GotOcr2ImageProcessor

    return GotOcr2ImageProcessor(
        size={"height": TILE, "width": TILE},
        image_mean=[0.485, 0.456, 0.406],
        image_std=[0.229, 0.224, 0.225],
        crop_to_patches=True,
        min_patches=min_tiles,
        max_patches=max_tiles,
    )


def _internvl(image: Image.Image, min_pixels: int, max_pixels: int) -> dict[str, torch.Tensor]:
    images = internvl_images(max_pixels // TILE**2, min_pixels // TILE**2)
    return {"pixel_values": images(image, return_tensors="pt")["pixel_values"]}


def _gemma4(image: Image.Image, min_pixels: int, max_pixels: int) -> dict[str, torch.Tensor]:
    from transformers.models.gemma4 import Gemma4ImageProcessor

    made = Gemma4ImageProcessor(max_soft_tokens=max_pixels // TOKEN)(image, return_tensors="pt")
    patches = int(made["num_soft_tokens_per_image"][0]) * 9
    assert (made["image_position_ids"][:, patches:] == -1).all()  # ours are padded to the largest image
    return {name: made[name][:, :patches] for name in ("pixel_values", "image_position_ids")}


#: Side of an InternVL tile, and pixels of a token of Gemma 4.
TILE, TOKEN = 448, 48**2
#: Family of another kind -> what its processor makes of an image between two bounds of pixels, and such bounds.
OTHERS: dict[str, tuple[Callable[[Image.Image, int, int], dict[str, torch.Tensor]], tuple[int, int]]] = {
    "internvl": (_internvl, (TILE**2, 4 * TILE**2)),
    "gemma4": (_gemma4, (70 * TOKEN, 140 * TOKEN)),
}


def image_inputs(name: str, image: Image.Image, min_pixels: int, max_pixels: int) -> dict[str, torch.Tensor]:
    """What the processor of a family makes of an image for its model."""
    if name in OTHERS:
        return OTHERS[name][0](image, min_pixels, max_pixels)
    return dict(image_processor(name, min_pixels, max_pixels)(image, return_tensors="pt"))


def bounds(name: str) -> tuple[int, int]:
    """Bounds of pixels to try a family with."""
    return OTHERS[name][1] if name in OTHERS else (64 * 64, 320 * 320)
