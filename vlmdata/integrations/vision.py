"""Vision encoders of transformers' models: no waits for the device, and no process that leaves the encoder out.

transformers reads the grids of images from the device several times in each forward pass. Each time, the host waits
until the device has computed all that was asked of it. The host knows the grids of a pack. So a prepared model gets
them there, and what transformers' own functions derive from them (indices, positions, boundaries) is copied to the
device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from vlmdata.integrations import attention
from vlmdata.integrations.segments import PACK, to_device

#: Images whose indices are remembered: about 20 MB at 1,000 tokens per image.
_REMEMBERED = 128


def before_model(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pre-hook of language and vision model, with keywords."""
    attention.register()  # a prepared model may come from another process
    if not _is_pack(kwargs):
        return None
    kwargs = kwargs | _grids_on_host(kwargs)
    if kwargs.get("pixel_values") is None and kwargs.get("pixel_values_videos") is None and _has_peers():
        kwargs = kwargs | _used_for_nothing(model, kwargs["input_ids"])
    return args, kwargs


def _is_pack(kwargs: dict[str, Any]) -> bool:
    positions = kwargs.get("position_ids")
    if positions is None or positions.ndim != 3 or len(positions) != 4:
        return False
    return kwargs.get("input_ids") is not None and kwargs.get("past_key_values") is None


def _has_peers() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _grids_on_host(kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The grids of the running pack as tensors on the host."""
    batch = PACK.get()
    if batch is None:
        return {}
    grids = {"image_grid_thw": batch.host.image_grid_thw, "video_grid_thw": batch.host.video_grid_thw}
    return {name: torch.from_numpy(grid.copy()) for name, grid in grids.items() if kwargs.get(name) is not None}


def _used_for_nothing(model: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Arguments for a pack of text that uses the encoder, too.

    DDP and FSDP wait for all processes at the parameters that one of them uses. The encoder gets one black token's
    worth of patches, and what it returns counts zero times.
    """
    config, visual = model.visual.config, model.visual
    side = visual.spatial_merge_size
    columns = config.in_channels * config.temporal_patch_size * config.patch_size**2
    pixels = torch.zeros(side**2, columns, dtype=visual.dtype, device=ids.device)
    features = model.get_image_features(pixels, torch.tensor([[1, side, side]]), return_dict=True)
    parts = [*features.pooler_output, *(getattr(features, "deepstack_features", None) or ())]
    embeds = model.get_input_embeddings()(ids)
    nothing = sum(part.sum() for part in parts) * 0.0
    return {"input_ids": None, "inputs_embeds": embeds + nothing.to(embeds.dtype)}


def before_encoder(visual: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pre-hook of the vision encoder, with keywords: if the grids are on the host, it gets all that it derives of them.

    It takes the keywords that transformers has for tensors computed in advance (``transformers.vision_utils``).
    """
    grids = kwargs.get("grid_thw")
    if grids is None or grids.device.type != "cpu" or not len(grids):
        return None
    home = (args[0] if args else kwargs["hidden_states"]).device
    derived = _derived(visual, grids).items()
    found = {name: to_device(each, home) if isinstance(each, torch.Tensor) else each for name, each in derived}
    return args, found | kwargs


def _derived(visual: Any, grids: torch.Tensor) -> dict[str, Any]:
    from transformers import vision_utils
    from transformers.utils.generic import get_max_seqlen

    config, merge = visual.config, visual.spatial_merge_size
    side, mode, corners = (getattr(visual, name, None) for name in _TABLE)
    each = [_of_grid(tuple(grid), merge, side, mode, corners) for grid in grids.tolist()]
    found: dict[str, Any] = {name: torch.cat([one[name] for one in each]) for name in each[0]}
    found["cu_seqlens"], found["max_seqlen"] = vision_utils.get_vision_attention_seqlens(grids, config)
    if hasattr(visual, "window_size"):
        order, bounds = vision_utils.get_vision_window_index(grids, merge, visual.window_size, visual.patch_size)
        found |= {"window_index": order, "cu_window_seqlens": bounds}
        found["max_window_seqlen"] = get_max_seqlen(bounds, config)
    return found


#: Attributes of encoders with a table of positions that is interpolated to each grid.
_TABLE = ("num_grid_per_side", "interpolation_mode", "interpolation_align_corners")


@lru_cache(_REMEMBERED)
def _of_grid(
    grid: tuple[int, int, int], merge: int, side: int | None, mode: str, corners: bool
) -> dict[str, torch.Tensor]:
    """What an encoder derives of each image by itself: the same for all images of a grid."""
    from transformers import vision_utils

    grids = torch.tensor([grid])
    found = {"position_ids": vision_utils.get_vision_position_ids(grids, merge)}
    if side is not None:
        found["interp_indices"], found["interp_weights"] = vision_utils.get_vision_interpolation_indices_and_weights(
            grids, num_grid_per_side=side, mode=mode, align_corners=corners, spatial_merge_size=merge
        )
    return found


def exchange_deepstack(text: Any) -> Callable[[], None]:
    """Makes a decoder with deepstack add features of images to its hidden states without waiting for the device.

    Returns:
        What undoes that.
    """
    if not hasattr(type(text), "_deepstack_process") or "_deepstack_process" in vars(text):
        return lambda: None
    text._deepstack_process = _deepstack

    def undo() -> None:
        vars(text).pop("_deepstack_process", None)

    return undo


def _deepstack(hidden_states: torch.Tensor, visual_pos_masks: torch.Tensor, visual_embeds: torch.Tensor) -> Any:
    """Adds (images' tokens, hidden) to the places of (rows, T, hidden) at which a mask (rows, T) is set."""
    rows = hidden_states.flatten(0, 1)
    embeds = visual_embeds.to(rows.device, rows.dtype)
    # A mask as an index waits for the number of its places, which is that of the features.
    places = visual_pos_masks.to(rows.device).flatten().nonzero_static(size=len(embeds))[:, 0]
    return rows.index_copy(0, places, rows.index_select(0, places) + embeds).view_as(hidden_states)
