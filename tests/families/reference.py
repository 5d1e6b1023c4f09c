"""What transformers says of each family: its image processor, its position code."""

from __future__ import annotations

from typing import Any

import torch

#: Family -> (model, config) in transformers, and keyword arguments of the published image processor.
_HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5.modeling_qwen3_5:Qwen3_5Model", "Qwen3_5Config", {"patch_size": 16, **_HALF}),
    "qwen3_vl": ("qwen3_vl.modeling_qwen3_vl:Qwen3VLModel", "Qwen3VLConfig", {"patch_size": 16, **_HALF}),
    "qwen2_5_vl": ("qwen2_5_vl.modeling_qwen2_5_vl:Qwen2_5_VLModel", "Qwen2_5_VLConfig", {"patch_size": 14}),
}


def image_processor(name: str, min_pixels: int, max_pixels: int) -> Any:
    """The torchvision image processor of a family."""
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
