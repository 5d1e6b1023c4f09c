"""What must hold on CUDA: Transformer Engine against plain torch, with equal weights, on one packed batch.

On a CUDA machine with megatron-core, Transformer Engine and flash-linear-attention, from the repository root::

    python -m tests.model.gpu_checks                       # one GPU
    torchrun --nproc-per-node 2 -m tests.model.gpu_checks  # layouts of two

A word after the command selects the checks whose names contain it.

The measure is the error against torch in float32: that of Transformer Engine in bfloat16 must be no more than
``FACTOR`` times that of torch in bfloat16, tensor by tensor, since both round alike and only orders of summation
differ.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import math
import os
import re
import sys
import time
import traceback
from typing import Any

import torch

from model.parallel.environment import before_megatron

before_megatron()

from model.architecture import MoeArchitecture, VisionArchitecture
from model.families import spec_of
from model.families.qwen3_5.architecture import Qwen35Architecture, Qwen35LanguageArchitecture
from model.families.qwen3_5.presets import pattern
from model.families.qwen3_vl.architecture import Qwen3VLArchitecture, Qwen3VLLanguageArchitecture
from model.kernels.configurations import choose_configurations
from model.network.megatron_config import vision_config
from model.network.settings import ModelSettings, vocabulary_rows
from model.network.vision_attention import FlashAttention
from model.parallel import groups
from model.weight_names.table import canonical_names, load_from_hf
from tests.model.gpu_experts import in_the_buffers, products_agree
from tests.model.gpu_gradients import small_gradients, sums_optimizer
from tests.model.gpu_kernels import KERNELS
from tests.model.gpu_lora import adapters_against_torch
from tests.model.helpers import IMAGE, VIDEO, VISION_END, VISION_START, make_sample, pack, relative, weights_of
from vlmdata.batch import PackedBatch

FACTOR = 4.0
CUDA = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def architecture(moe: bool = False, family: str = "qwen3_5") -> Any:
    """Real head widths, which the kernels are made for (72 in the tower, 256 and 128 in the decoder); little else."""
    if family == "qwen3_vl":
        return architecture_vl(moe)
    language = Qwen35LanguageArchitecture(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=0 if moe else 512,
        layer_types=pattern(4),
        num_attention_heads=4,
        num_key_value_heads=2,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        moe=MoeArchitecture(8, 2, 128, 128, 0.01) if moe else None,
    )
    vision = VisionArchitecture(depth=3, hidden_size=288, intermediate_size=512, num_heads=4, out_hidden_size=256)
    return Qwen35Architecture(vision, language, IMAGE, VIDEO, VISION_START, VISION_END)


def with_heads_of_64(wanted: Any) -> Any:
    """The architecture with narrower heads in the tower, as FlashAttention 4 takes them."""
    return dataclasses.replace(wanted, vision=dataclasses.replace(wanted.vision, hidden_size=256))


def architecture_vl(moe: bool) -> Qwen3VLArchitecture:
    """The same of Qwen3-VL, with image features for the first two of four layers."""
    language = Qwen3VLLanguageArchitecture(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=0 if moe else 512,
        layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        moe=MoeArchitecture(8, 2, 128, router_aux_loss_coef=0.01) if moe else None,
    )
    tower = architecture().vision
    vision = dataclasses.replace(tower, deepstack_layers=(0, 1))
    return Qwen3VLArchitecture(vision, language, IMAGE, VIDEO, VISION_START, VISION_END)


def batch(weighted: bool = False) -> PackedBatch:
    """Images of several sizes, a sample without, and padding; aligned for two context-parallel ranks of two.

    Args:
        weighted: Whether targets weigh from 0.25 to 6 in the loss.
    """
    samples = [
        make_sample(1, [(16, 24)], 300, weighted),
        make_sample(2, [], 200, weighted),
        make_sample(3, [(24, 16), (8, 8)], 500, weighted),
        make_sample(4, [(2, 2)], 60, weighted),
    ]
    return pack(samples, alignment=16, tail=64)


def videos() -> PackedBatch:
    """Videos of several lengths and sizes, beside images and in samples of their own."""
    samples = [
        make_sample(1, [(5, 16, 12), (8, 8)], 200),
        make_sample(2, [(16, 24), (2, 8, 20), (1, 24, 16)], 300),
        make_sample(3, [], 100),
        make_sample(4, [(12, 8, 8)], 60),
    ]
    return pack(samples, alignment=16, tail=64)


def run(
    wanted: Any, packed: PackedBatch, settings: ModelSettings
) -> tuple[float, dict[str, torch.Tensor], dict[str, float]]:
    """Loss (sum over all ranks), gradients by canonical name as this rank has them, and metrics."""
    import torch.distributed as dist
    from megatron.core import parallel_state as state

    tensor, context = state.get_tensor_model_parallel_world_size(), state.get_context_parallel_world_size()
    model = with_weights(spec_of(wanted).build(wanted, settings), wanted)
    mine = packed.context_parallel_shard(state.get_context_parallel_rank(), context) if context > 1 else packed
    losses = model(mine.to(CUDA))
    losses.sum().backward()
    total = losses.detach().sum() / tensor
    dist.all_reduce(total)
    names = canonical_names(model)
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.float()
        if context > 1:
            dist.all_reduce(gradient, group=model.pg_collection.cp)
        # What finalize_model_grads would do.
        of_heads = tensor > 1 and ("q_layernorm" in name or "k_layernorm" in name)
        if of_heads or (settings.sequence_parallel and getattr(parameter, "sequence_parallel", False)):
            dist.all_reduce(gradient, group=model.pg_collection.tp)
        gradients[names[name]] = gradient
    return float(total), gradients, model.metrics.pop(model.metric_names, device="cuda")


def with_weights(model: Any, wanted: Any, weights: dict[str, torch.Tensor] | None = None) -> Any:
    """The model, or the part of it that this rank has, with given weights, or some that do not depend on the layout."""
    from megatron.core import parallel_state as state

    tensor = state.get_tensor_model_parallel_world_size()
    values = weights_of(wanted) if weights is None else weights
    load_from_hf(
        model,
        spec_of(wanted).parameter_maps(wanted, vocab_rows=vocabulary_rows(wanted.language.vocab_size, tensor)),
        lambda source: source.take(values[source.name]),
        tensor_rank=state.get_tensor_model_parallel_rank(),
        tensor_parallel=tensor,
    )
    return model.train()


def of_all_experts(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradients of a layer's experts as one."""
    joined: dict[str, list[torch.Tensor]] = {}
    for name in sorted(gradients):
        joined.setdefault(re.sub(r"local_experts\.\d+", "local_experts", name), []).append(gradients[name].flatten())
    return {name: torch.cat(parts) for name, parts in joined.items()}


def engine_against_torch(
    moe: bool,
    vision_attention: str = "transformer_engine",
    weighted: bool = False,
    family: str = "qwen3_5",
    compiled: bool = False,
    packed: PackedBatch | None = None,
) -> None:
    """One GPU, in bfloat16, judged by torch in float32; weighted losses with the fused cross-entropy of training."""
    wanted, packed = architecture(moe, family), packed or batch(weighted)
    if vision_attention == "flash_attention_4":
        wanted = with_heads_of_64(wanted)
    exact_loss, exact, exact_metrics = run(wanted, packed, ModelSettings())
    plain_loss, plain, _ = run(wanted, packed, ModelSettings(precision="bf16"))
    settings = ModelSettings(
        backend="transformer_engine",
        precision="bf16",
        vision_attention=vision_attention,
        fused_cross_entropy=weighted,
        compile=compiled,
    )
    loss, found, metrics = run(wanted, packed, settings)
    print(f"  loss {exact_loss:.3f} exact, {plain_loss:.3f} torch, {loss:.3f} engine; {exact_metrics} {metrics}")
    assert set(found) == set(exact), set(found) ^ set(exact)
    # A token that bfloat16 sends to another expert changes two experts much and all of them together little.
    found, plain, exact = (of_all_experts(each) for each in (found, plain, exact))
    errors = {name: (relative(found[name], exact[name]), relative(plain[name], exact[name])) for name in exact}
    worst = sorted(errors, key=lambda name: -errors[name][0])[:5]
    print(
        "  worst:",
        *(f"{name} engine {errors[name][0]:.1e} torch {errors[name][1]:.1e}" for name in worst),
        sep="\n    ",
    )
    ratio, name = max((engine / max(torchs, 4e-3), name) for name, (engine, torchs) in errors.items())
    print(f"  largest ratio, engine over torch (or one rounding): {ratio:.1f}, {name}")
    assert abs(loss / exact_loss - 1) < 5e-3  # about one rounding
    bad = [name for name, (engine, torchs) in errors.items() if not engine <= FACTOR * max(torchs, 4e-3) < math.inf]
    assert not bad, bad


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
    common = {"backend": "transformer_engine", "precision": "bf16", "fused_cross_entropy": weighted}
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


def sides_against_one_gpu(family: str = "qwen3_5", ahead: int = 1, backend: str = "transformer_engine") -> None:
    """Vision on one GPU, language on the other, four micro-batches: loss within 1e-4, gradients in bfloat16's reach."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from model.parallel.separation import forget_separation

    wanted = architecture(family=family)
    texts = pack([make_sample(5, [], 600)], alignment=16, tail=64)
    packs = [batch(), texts, videos(), batch(weighted=True)]
    settings = ModelSettings(backend=backend, precision="fp32" if CUDA.type == "cpu" else "bf16")
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

    from model.network.vision_model import build_vision_model
    from model.parallel.separation import separation
    from model.training.settings.config_loading import load_config
    from model.training.vision_side import VisionSide
    from vlmdata.loader.request.pack_request import PackImages
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


def float_patches_and_recompute(family: str = "qwen3_5") -> None:
    """Recomputed blocks and layers give the same gradients."""
    wanted, packed = architecture(family=family), batch()
    settings = ModelSettings(backend="transformer_engine", precision="bf16")
    _, plain, _ = run(wanted, packed, settings)
    _, again, _ = run(wanted, packed, dataclasses.replace(settings, recompute="full", vision_recompute=True))
    worst = max((relative(again[name], plain[name]), name) for name in plain)
    print("  worst:", worst)
    assert worst[0] < 0.05


def main() -> int:
    """Runs what the number of GPUs allows; the exit status is the number of failures."""
    faulthandler.dump_traceback_later(550, exit=True)
    groups.initialize()
    world = torch.distributed.get_world_size()
    # As in a run: of the kernels' many configurations, Triton chooses among few.
    choose_configurations(128, 128, torch.cuda.get_device_capability())
    checks: dict[str, Any] = KERNELS | {
        "small gradients": small_gradients,
        "sums optimizer": sums_optimizer,
        "experts, one product": products_agree,
        "experts, in the buffers": in_the_buffers,
        "engine against torch, dense": lambda: engine_against_torch(moe=False),
        "engine against torch, experts": lambda: engine_against_torch(moe=True),
        "with torch's compiler, dense": lambda: engine_against_torch(moe=False, compiled=True),
        "with torch's compiler, experts": lambda: engine_against_torch(moe=True, compiled=True),
        "weighted losses, dense": lambda: engine_against_torch(moe=False, weighted=True),
        "weighted losses, experts": lambda: engine_against_torch(moe=True, weighted=True),
        "recompute": float_patches_and_recompute,
        "Qwen3-VL, dense": lambda: engine_against_torch(moe=False, family="qwen3_vl"),
        "Qwen3-VL, experts": lambda: engine_against_torch(moe=True, family="qwen3_vl"),
        "Qwen3-VL, recompute": lambda: float_patches_and_recompute("qwen3_vl"),
        "adapters, dense": lambda: adapters_against_torch(False),
        "adapters, experts": lambda: adapters_against_torch(True),
        "adapters, dense, recomputed": lambda: adapters_against_torch(False, recompute="full"),
        "adapters, dense, norms recomputed": lambda: adapters_against_torch(False, recompute="selective"),
        "adapters, NF4, dense": lambda: adapters_against_torch(False, storage="nf4"),
        "adapters, NF4, experts": lambda: adapters_against_torch(True, storage="nf4"),
        "adapters, NF4, Qwen3-VL, experts, recomputed": lambda: adapters_against_torch(True, "qwen3_vl", "full", "nf4"),
        "adapters, Qwen3-VL, dense": lambda: adapters_against_torch(False, "qwen3_vl"),
        "adapters, Qwen3-VL, experts, recomputed": lambda: adapters_against_torch(True, "qwen3_vl", "full"),
        "videos": lambda: engine_against_torch(moe=False, packed=videos()),
        "Qwen3-VL, videos": lambda: engine_against_torch(moe=False, family="qwen3_vl", packed=videos()),
    }
    if FlashAttention.is_usable(vision_config(with_heads_of_64(architecture()), ModelSettings(precision="bf16"))):
        checks["FlashAttention 4 in the tower"] = lambda: engine_against_torch(False, "flash_attention_4")
        checks["FlashAttention 4 in the tower, videos"] = lambda: engine_against_torch(
            False, "flash_attention_4", packed=videos()
        )
    else:
        print("FlashAttention 4 is not installed: its check is left out")
    if world > 1:
        checks = {
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
    checks = {name: check for name, check in checks.items() if all(word in name for word in sys.argv[1:])}
    failures = 0
    for name, check in checks.items():
        print(f"== {name}", flush=True)
        begun = time.perf_counter()
        try:
            check()
            print(f"  holds, {time.perf_counter() - begun:.0f} s", flush=True)
        except Exception:
            failures += 1
            traceback.print_exc()
            if world > 1:
                break  # the other rank may hang in a collective
    print(f"{failures} of {len(checks)} failed", flush=True)
    groups.destroy()
    return failures


if __name__ == "__main__":
    sys.exit(main())
