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
from vlmdata.integrations.segments import PACK
from vlmdata.integrations.supported import has_one_axis
from vlmdata.integrations.windows import to_device

#: Images whose indices are remembered: about 20 MB at 1,000 tokens per image.
_REMEMBERED = 128


def before_model(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pre-hook of language and vision model, with keywords."""
    attention.register()  # a prepared model may come from another process
    if not _is_pack(model, kwargs):
        return None
    kwargs = kwargs | _grids_on_host(kwargs)
    if kwargs.get("pixel_values") is None and kwargs.get("pixel_values_videos") is None and _has_peers():
        kwargs = kwargs | _used_for_nothing(model, kwargs["input_ids"])
    return args, kwargs


def _is_pack(model: Any, kwargs: dict[str, Any]) -> bool:
    positions = kwargs.get("position_ids")
    if positions is None or kwargs.get("input_ids") is None or kwargs.get("past_key_values") is not None:
        return False
    shape = tuple(positions.shape)
    return shape[:-1] == (1,) if has_one_axis(model) else len(shape) == 3 and shape[0] == 4


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
    worth of patches, or one black tile, and what it returns counts zero times.
    """
    features = model.get_image_features(**_black(model, ids.device), return_dict=True)
    parts = [*features.pooler_output, *(getattr(features, "deepstack_features", None) or ())]
    embeds = model.get_input_embeddings()(ids)
    nothing = sum(part.sum() for part in parts) * 0.0
    inputs = {"input_ids": None, "inputs_embeds": embeds + nothing.to(embeds.dtype)}
    if model.config.model_type == "gemma4":
        inputs["mm_token_type_ids"] = torch.zeros_like(ids)
        if model.config.text_config.hidden_size_per_layer_input:  # else it looks for the ids of all embeddings
            inputs["per_layer_inputs"] = model.language_model.get_per_layer_inputs(ids, None)
    return inputs


def _black(model: Any, device: torch.device) -> dict[str, torch.Tensor]:
    """Arguments of ``get_image_features`` for the smallest image."""
    kind, config = model.config.model_type, model.config.vision_config
    if kind == "internvl":
        height, width = config.image_size
        return {"pixel_values": torch.zeros(1, config.num_channels, height, width, device=device)}
    if kind == "gemma4":
        side = config.pooling_kernel_size
        places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).to(device)
        pixels = torch.zeros(1, side**2, 3 * config.patch_size**2, device=device)
        return {"pixel_values": pixels, "image_position_ids": places[None]}
    side, visual = model.visual.spatial_merge_size, model.visual
    columns = config.in_channels * config.temporal_patch_size * config.patch_size**2
    pixels = torch.zeros(side**2, columns, dtype=visual.dtype, device=device)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, side, side]])}


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
