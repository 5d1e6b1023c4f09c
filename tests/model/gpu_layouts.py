"""Layouts of two GPUs against one, for :mod:`tests.model.gpu_checks`."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tests.model.gpu_models import CUDA, ENGINE, architecture, batch, run, sample, videos, with_weights
from tests.model.helpers import pack, relative
from vlmdata.batch import PackedBatch
from vlmdata.model.families import spec_of
from vlmdata.model.network.settings import ModelSettings
from vlmdata.model.parallel import groups
from vlmdata.model.weight_names.table import canonical_names


def layout_against_one_gpu(
    sizes: dict[str, int],
    moe: bool = False,
    weighted: bool = False,
    family: str = "qwen3_5",
    packed: PackedBatch | None = None,
    **options: Any,
) -> None:
    """Two GPUs: loss within 1e-3, replicated parameters' gradients within bfloat16's reach."""
    from megatron.core import parallel_state

    wanted, packed = architecture(moe, family), packed or batch(weighted)
    common: dict[str, Any] = {**ENGINE, "fused_cross_entropy": weighted and CUDA.type == "cuda"}
    alone_loss, alone, _ = run(wanted, packed, ModelSettings(**common))  # every rank by itself: data parallel
    alone_loss /= torch.distributed.get_world_size()
    parallel_state.destroy_model_parallel()
    groups.initialize(**sizes)
    try:
        parallel = {f"{name}_parallel": size for name, size in sizes.items()}
        loss, found, _ = run(wanted, packed, ModelSettings(**common, **parallel, **options))
        print(f"  loss {alone_loss:.3f} one GPU, {loss:.3f} {sizes}")
        assert abs(loss / alone_loss - 1) < 1e-3
        same = {name: gradient for name, gradient in found.items() if gradient.shape == alone[name].shape}
        errors = sorted(((relative(same[name], alone[name]), name) for name in same), reverse=True)
        print("  worst:", errors[:3])
        assert errors[0][0] < 0.1, errors[:5]
    finally:
        parallel_state.destroy_model_parallel()
        groups.initialize()


def sides_against_one_gpu(family: str = "qwen3_5", ahead: int = 1) -> None:
    """Vision on one GPU, language on the other, four micro-batches: loss within 1e-4, gradients in bfloat16's reach."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from vlmdata.model.parallel.separation import forget_separation

    wanted = architecture(family=family)
    texts = pack([sample(5, [], 600)], alignment=16, tail=64)
    packs = [batch(), texts, videos(), batch(weighted=True)]
    settings = ModelSettings(**ENGINE)
    alone = with_weights(spec_of(wanted).build(wanted, settings), wanted)
    alone_loss = losses_of(alone, packs)
    print("  one GPU is done", flush=True)  # which takes minutes if kernels are tuned
    expected = {canonical_names(alone)[name]: each.grad.float() for name, each in alone.named_parameters()}
    parallel_state.destroy_model_parallel()
    groups.initialize(vision=1)
    try:
        model, loss = side_of(wanted, dataclasses.replace(settings, separate_vision=True), packs, ahead)
        total = torch.tensor(loss, device=CUDA)
        dist.all_reduce(total)
        print(f"  loss {alone_loss:.4f} one GPU, {float(total):.4f} on two")
        assert abs(float(total) / alone_loss - 1) < 1e-4
        found = {canonical_names(model)[name]: each.grad.float() for name, each in model.named_parameters()}
        errors = sorted(((relative(found[name], expected[name]), name) for name in found), reverse=True)
        print(f"  rank {dist.get_rank()}, {len(found)} of {len(expected)} parameters, worst:", errors[:3], flush=True)
        assert errors[0][0] < 0.02, errors[:5]
        mine = torch.tensor(len(found), device=CUDA)
        dist.all_reduce(mine)
        assert int(mine) == len(expected)
    finally:
        forget_separation()
        parallel_state.destroy_model_parallel()
        groups.initialize()


def side_of(wanted: Any, settings: ModelSettings, packs: list[PackedBatch], ahead: int) -> tuple[Any, float]:
    """This side's model with its gradients, and the sum of its losses."""
    from types import SimpleNamespace

    from vlmdata.loader.request.pack_request import PackImages
    from vlmdata.model.network.vision_model import build_vision_model
    from vlmdata.model.parallel.separation import separation
    from vlmdata.model.training.settings.config_loading import load_config
    from vlmdata.model.training.vision_side import VisionSide
    from vlmdata.packing.item_runs import ItemRuns

    sides = separation()
    assert sides is not None
    build = build_vision_model if sides.holds_tower else spec_of(wanted).build
    model = with_weights(build(wanted, settings), wanted)
    model.config.finalize_model_grads_func = lambda *_: None
    learner: Any = SimpleNamespace(model=[model])
    config = load_config(None, [("parallel.vision_ahead", ahead)])
    dtype = next(model.parameters()).dtype
    side = VisionSide(sides, learner, config, wanted, CUDA, dtype)
    images = [
        [PackImages(h.cu_seqlens, h.cu_seqlens_padded, i.grids, i.starts, i.are_videos, ItemRuns.whole(i.grids))]
        for h, i in ((each.host, each.host.items) for each in packs)
    ]
    moved = (each.to(CUDA) for each in packs)
    found = side.run(images, moved, lambda: losses_of(model, packs), forward_only=False)
    return model, 0.0 if sides.holds_tower else found


def losses_of(model: Any, packs: list[PackedBatch]) -> float:
    """The sum of the losses of micro-batches, whose gradients add up."""
    total = torch.zeros((), device=CUDA)
    for each in packs:
        losses = model(each.to(CUDA))
        losses.sum().backward()
        total += losses.detach().sum()
    return float(total)


#: Layouts of two GPUs.
TWO_GPUS: dict[str, Any] = {
    "context 2": lambda: layout_against_one_gpu({"context": 2}),
    "context 2, weighted losses": lambda: layout_against_one_gpu({"context": 2}, weighted=True),
    "tensor 2 + sequence": lambda: layout_against_one_gpu({"tensor": 2}, sequence_parallel=True),
    "tensor 2": lambda: layout_against_one_gpu({"tensor": 2}),
    "Qwen3-VL, context 2": lambda: layout_against_one_gpu({"context": 2}, family="qwen3_vl"),
    "Qwen3-VL, tensor 2 + sequence": lambda: layout_against_one_gpu(
        {"tensor": 2}, family="qwen3_vl", sequence_parallel=True
    ),
    "videos, context 2": lambda: layout_against_one_gpu({"context": 2}, packed=videos()),
    "Qwen3-VL, videos, tensor 2 + sequence, items spread": lambda: layout_against_one_gpu(
        {"tensor": 2}, family="qwen3_vl", packed=videos(), sequence_parallel=True, vision_tensor_parallel=1
    ),
    "vision GPUs 1 + 1": sides_against_one_gpu,
    "vision GPUs 1 + 1, none ahead": lambda: sides_against_one_gpu(ahead=0),
    "Qwen3-VL, vision GPUs 1 + 1": lambda: sides_against_one_gpu("qwen3_vl", ahead=3),
}
