"""Models, packs and gradients of the checks on CUDA; see :mod:`tests.model.gpu_checks`."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch

from tests.model.helpers import (
    IMAGE,
    VIDEO,
    VISION_END,
    VISION_START,
    make_sample,
    pack,
    small_architecture,
    weights_of,
)
from vlmdata.batch import PackedBatch
from vlmdata.model.architecture import MoeArchitecture, VisionArchitecture
from vlmdata.model.families import spec_of
from vlmdata.model.families.qwen3_5.architecture import Qwen35Architecture, Qwen35LanguageArchitecture
from vlmdata.model.families.qwen3_5.presets import pattern
from vlmdata.model.families.qwen3_vl.architecture import Qwen3VLArchitecture, Qwen3VLLanguageArchitecture
from vlmdata.model.network.settings import ModelSettings, vocabulary_rows
from vlmdata.model.weight_names.table import canonical_names, load_from_hf

#: The CPU in the suite, which runs the checks of two GPUs on two of its processes (``parallel/test_gpu_checks.py``).
CUDA = (
    torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else torch.device("cpu")
)
#: What is checked.
ENGINE = {"backend": "transformer_engine", "precision": "bf16"} if CUDA.type == "cuda" else {"backend": "torch"}


def architecture(moe: bool = False, family: str = "qwen3_5") -> Any:
    """Real head widths, which the kernels are made for (72 in the tower, 256 and 128 in the decoder); little else.

    On the CPU a small one, since only layouts are checked there.
    """
    if CUDA.type == "cpu":
        return small_architecture(family, moe=moe)
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


def sample(seed: int, items: list[tuple[int, ...]], words: int, weighted: bool = False) -> Any:
    """A sample of images and videos of given patches, and a text; on the CPU a quarter as wide and as long."""
    if CUDA.type == "cpu":
        items = [(*each[:-2], each[-2], max(2, each[-1] // 8 * 2)) for each in items]
        words = words // 4
    return make_sample(seed, items, words, weighted)


def batch(weighted: bool = False) -> PackedBatch:
    """Images of several sizes, a sample without, and padding; aligned for two context-parallel ranks of two.

    Args:
        weighted: Whether targets weigh from 0.25 to 6 in the loss.
    """
    samples = [
        sample(1, [(16, 24)], 300, weighted),
        sample(2, [], 200, weighted),
        sample(3, [(24, 16), (8, 8)], 500, weighted),
        sample(4, [(2, 2)], 60, weighted),
    ]
    return pack(samples, alignment=16, tail=64)


def videos() -> PackedBatch:
    """Videos of several lengths and sizes, beside images and in samples of their own."""
    samples = [
        sample(1, [(5, 16, 12), (8, 8)], 200),
        sample(2, [(16, 24), (2, 8, 20), (1, 24, 16)], 300),
        sample(3, [], 100),
        sample(4, [(12, 8, 8)], 60),
    ]
    return pack(samples, alignment=16, tail=64)


def run(
    wanted: Any, packed: PackedBatch, settings: ModelSettings
) -> tuple[float, dict[str, torch.Tensor], dict[str, float]]:
    """Loss (sum over all ranks), gradients by canonical name as this rank has them, and metrics."""
    import torch.distributed as dist
    from megatron.core import parallel_state as state

    tensor, context = state.get_tensor_model_parallel_world_size(), state.get_context_parallel_world_size()
    model = with_weights(spec_of(wanted).build(wanted, settings), wanted, vision_parallel=settings.vision_parallel)
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
        of_tokens = settings.sequence_parallel and getattr(parameter, "sequence_parallel", False)
        of_items = settings.vision_parallel < tensor and names[name].startswith("vision.")
        if of_heads or of_tokens or of_items:
            dist.all_reduce(gradient, group=model.pg_collection.tp)
        gradients[names[name]] = gradient
    return float(total), gradients, model.metrics.pop(model.metric_names, device="cuda")


def with_weights(
    model: Any, wanted: Any, weights: dict[str, torch.Tensor] | None = None, vision_parallel: int | None = None
) -> Any:
    """The model, or the part of it that this rank has, with given weights, or some that do not depend on the layout.

    ``vision_parallel`` is the tensor-parallel size of the tower, if it has its own.
    """
    from megatron.core import parallel_state as state

    tensor = state.get_tensor_model_parallel_world_size()
    values = weights_of(wanted) if weights is None else weights
    load_from_hf(
        model,
        spec_of(wanted).parameter_maps(wanted, vocab_rows=vocabulary_rows(wanted.language.vocab_size, tensor)),
        lambda source: source.take(values[source.name]),
        tensor_rank=state.get_tensor_model_parallel_rank(),
        tensor_parallel=tensor,
        vision_parallel=vision_parallel,
    )
    return model.train()
