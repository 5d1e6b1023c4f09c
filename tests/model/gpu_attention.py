"""Attention of the vision tower on CUDA, for ``python -m tests.model.gpu_checks``: each gradient by itself.

In a whole model with random weights, little depends on queries. There, wrong gradients of queries went unseen
(decision 0026).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

import torch
from torch import Tensor

from tests.model.helpers import relative
from vlmdata.model.architecture import VisionArchitecture
from vlmdata.model.network.patch_geometry import PatchGeometry

CUDA = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
#: Long images, short ones, and one of two frames.
GRIDS = [(1, 60, 58), (1, 12, 8), (2, 20, 24), (1, 2, 2), (1, 46, 80)]
HEADS = 4
#: Relative error that bfloat16 may make.
ROUNDED = 0.02


def tower_attention() -> None:
    """All attention kernels of the tower against plain torch in float32, for the head widths of published sizes."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    from tests.model.gpu_models import architecture
    from vlmdata.model.network.megatron_config import vision_config
    from vlmdata.model.network.settings import ModelSettings
    from vlmdata.model.network.vision_attention import EngineAttention, FlashAttention

    for width in (64, 72, 128):
        vision = VisionArchitecture(
            depth=1, hidden_size=HEADS * width, intermediate_size=512, num_heads=HEADS, out_hidden_size=256
        )
        settings = ModelSettings(backend="transformer_engine", precision="bf16")
        config = vision_config(dataclasses.replace(architecture(), vision=vision), settings)
        kinds = {"Transformer Engine": EngineAttention(config, ProcessGroupCollection.use_mpu_process_groups())}
        if FlashAttention.is_usable(config):
            kinds["FlashAttention 4"] = FlashAttention()  # type: ignore[assignment]
        images = PatchGeometry.of(vision, GRIDS, CUDA)
        for name, kind in kinds.items():
            found = errors(kind, images, width)
            print(f"  {name}, heads of {width}: " + ", ".join(f"{part} {each:.1e}" for part, each in found.items()))
            assert max(found.values()) < ROUNDED, found


def errors(
    attention: Callable[[Tensor, Tensor, PatchGeometry], Tensor], images: PatchGeometry, width: int
) -> dict[str, float]:
    """Relative errors of the output and of the gradients of queries, keys and values."""
    from vlmdata.model.network.vision_attention import TorchAttention

    device = images.cu_seqlens.device
    generator = torch.Generator(device).manual_seed(0)
    product = torch.randn(images.bounds[-1], HEADS, 3, width, device=device, generator=generator).bfloat16()
    pull = torch.randn(images.bounds[-1], HEADS * width, device=device, generator=generator).bfloat16()
    runs = []
    for kind, dtype in ((attention, torch.bfloat16), (TorchAttention(), torch.float32)):
        mixed = product.to(dtype).requires_grad_()
        out = kind(mixed, torch.zeros(3 * HEADS * width, device=device, dtype=dtype), images)
        (gradient,) = torch.autograd.grad(out, mixed, pull.to(dtype))
        runs.append([out.detach(), *gradient.unbind(-2)])
    names = ("output", "d query", "d key", "d value")
    return {name: relative(a.float(), b) for name, a, b in zip(names, *runs, strict=True)}
