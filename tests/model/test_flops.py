"""The FLOP formula against what torch counts."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("megatron.core")

from tests.model.helpers import mixed_samples, pack, small_architecture
from vlmdata.model.families import REGISTRY, preset, spec_of
from vlmdata.model.families.qwen3_5.architecture import FULL_ATTENTION
from vlmdata.model.families.qwen3_5.presets import PRESETS
from vlmdata.model.families.qwen3_5.spec import step_flops
from vlmdata.model.network.settings import ModelSettings
from vlmdata.model.training.optimizer.learner import part_of

pytestmark = pytest.mark.usefixtures("one_process")


FROZEN = [parts for number in range(4) for parts in itertools.combinations(("vision", "merger", "language"), number)]


def counted(run: Any) -> int:
    # The plain way, as matrix products: torch does not count its fused attention on a CPU.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        run()
    return int(counter.get_total_flops())


def counted_with_backward(run: Any) -> int:
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        total = run().float().sum()
        if total.requires_grad:
            total.backward()
    return int(counter.get_total_flops())


def full_attention(family: str, moe: bool) -> Any:
    """A small model without delta nets, because torch does not count the delta rule."""
    if family == "qwen3_vl":
        return small_architecture(family, moe=moe)
    made = small_architecture(moe=moe, mtp=0)
    return dataclasses.replace(made, language=dataclasses.replace(made.language, layer_types=(FULL_ATTENTION,) * 3))


def built(architecture: Any) -> Any:
    return spec_of(architecture).build(architecture, ModelSettings(moe_aux_loss=0.0))


@pytest.mark.parametrize("family", REGISTRY)
def test_vision(family: str) -> None:
    architecture = full_attention(family, moe=False)
    tower = built(architecture).vision
    flops = spec_of(architecture).step_flops(architecture, False, ())
    grids = ((1, 4, 6), (1, 8, 2), (1, 2, 2))
    patches = np.array([h * w for _, h, w in grids])
    data = torch.randint(0, 256, (int(patches.sum()), 768), dtype=torch.uint8)
    embedding = 2 * 768 * architecture.vision.hidden_size * int(patches.sum())  # pixels need no gradient
    assert flops.of_vision(patches) == 3 * counted(lambda: tower(data, grids)) - embedding
    # A video: spans of one temporal patch each, and two frames to embed.
    videos, frames = ((3, 4, 2),), torch.randint(0, 256, (2 * 24, 768), dtype=torch.uint8)
    both = 3 * counted(lambda: tower(data, grids, frames, videos)) - embedding * (1 + 48 / int(patches.sum()))
    assert flops.of_vision(np.append(patches, [8] * 3), of_videos=24) == both


@pytest.mark.parametrize("family", REGISTRY)
@pytest.mark.parametrize("moe", [False, True])
def test_language_of_full_attention(moe: bool, family: str) -> None:
    architecture = full_attention(family, moe)
    model, flops = built(architecture), spec_of(architecture).step_flops(architecture, False, ())
    batch = pack(mixed_samples()[1:2], alignment=1)
    length = np.array([batch.total_tokens])
    found = counted(lambda: model(batch))
    # torch counts all of the square of attention, and logits of as many rows as targets are filled up to.
    square = flops.per_token_squared / 3 * float(length[0]) ** 2
    rows = min(128, batch.total_tokens)
    dummy = counted(lambda: model.vision(torch.zeros(0, 768, dtype=torch.uint8), ()))
    expected = flops.of(length, np.zeros(0, np.int64)) / 3 + square + flops.per_target / 3 * rows + dummy
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("family", REGISTRY)
def test_frozen_parts_forward_and_backward(frozen: tuple[str, ...], moe: bool, family: str) -> None:
    architecture = full_attention(family, moe)
    model = built(architecture)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part_of(name) not in frozen)
    batch = pack(mixed_samples()[:1], alignment=1)
    patches = np.array([h * w for _, h, w in batch.image_grid_thw.tolist()])
    flops = spec_of(architecture).step_flops(architecture, False, frozen)
    # torch counts all of the square of attention, and logits of as many rows as targets are filled up to.
    lengths, rows = np.array([batch.total_tokens]), min(128, batch.total_tokens)
    expected = flops.of(lengths, patches) + flops.per_token_squared * float(lengths[0]) ** 2 + flops.per_target * rows
    if architecture.language.moe is not None and "language" in frozen and len(frozen) < 3:
        # megatron-core computes the gradient of a router's weights even where nobody asks for it.
        experts, width = architecture.language.moe.num_experts, architecture.language.hidden_size
        expected += architecture.language.num_layers * 2 * experts * width * batch.total_tokens
    assert counted_with_backward(lambda: model(batch)) == pytest.approx(expected, rel=1e-12)


def test_the_delta_net_by_hand() -> None:
    architecture = small_architecture(mtp=0)
    language = architecture.language
    keys = language.linear_num_key_heads * language.linear_key_head_dim
    values = language.linear_num_value_heads * language.linear_value_head_dim
    heads, width = language.linear_num_value_heads, language.hidden_size
    with_full = dataclasses.replace(language, layer_types=(FULL_ATTENTION,) * 2)
    difference = (
        step_flops(architecture, mtp=False).per_token
        - step_flops(dataclasses.replace(architecture, language=with_full), mtp=False).per_token
    )
    queries, groups = language.num_attention_heads * language.head_dim, language.num_key_value_heads * language.head_dim
    attention = 2 * width * (3 * queries + 2 * groups)
    net = 2 * width * (2 * keys + 3 * values + 2 * heads) + 2 * 4 * (2 * keys + values)
    net += 6 * heads * language.linear_key_head_dim * language.linear_value_head_dim
    assert difference == 3 * (net - attention)


def test_frozen_parts_cost_less() -> None:
    architecture = small_architecture()
    lengths, patches = np.array([100, 50]), np.array([64])

    def work(*frozen: str) -> float:
        flops = step_flops(architecture, frozen=frozen)
        return flops.of(lengths, patches) + flops.per_target * 30

    assert work() > work("language") > work("language", "vision") > work("language", "vision", "merger")
    embedding = 2 * 768 * architecture.vision.hidden_size * 64  # has no gradient of its input
    assert work("language", "vision", "merger") == pytest.approx((work() + embedding) / 3)


def test_the_delta_rule_has_no_weights_to_freeze() -> None:
    architecture = small_architecture(mtp=0)
    language = architecture.language
    rule = 6 * language.linear_num_value_heads * language.linear_key_head_dim * language.linear_value_head_dim
    rule *= sum(kind != FULL_ATTENTION for kind in language.layer_types)
    trained, frozen = (step_flops(architecture, mtp=False, frozen=parts).per_token for parts in ((), ("language",)))
    assert (trained - 3 * rule) * 2 == (frozen - 3 * rule) * 3


def test_multi_token_prediction_adds_a_layer_and_a_head() -> None:
    architecture = small_architecture(mtp=1)
    without, full = step_flops(architecture, mtp=False), step_flops(architecture, mtp=True)
    assert full.per_target == 2 * without.per_target
    assert full.per_token_squared == 2 * without.per_token_squared  # the model has one full-attention layer
    assert full.per_patch == without.per_patch


@pytest.mark.parametrize(
    ("name", "billions"),
    # Parameters of the published checkpoints without their embedding tables and vision towers, output layer included.
    [("0.8b", 0.75), ("2b", 1.88), ("4b", 4.21), ("9b", 7.94)],
)
def test_tokens_cost_six_flop_per_weight(name: str, billions: float) -> None:
    # The usual rule. Targets alone meet the output layer; the delta rule's own arithmetic is small.
    flops = step_flops(PRESETS[name], mtp=False)
    assert (flops.per_token + flops.per_target) / 6e9 == pytest.approx(billions, rel=0.04)


@pytest.mark.parametrize(
    ("name", "billions"),
    # Parameters of Qwen3's language models 1.7B, 4B, 8B and 32B, less the embedding table where it is not the output
    # layer.
    [("qwen3-vl-2b", 1.72), ("qwen3-vl-4b", 4.02), ("qwen3-vl-8b", 8.19 - 0.62), ("qwen3-vl-32b", 32.76 - 0.78)],
)
def test_tokens_of_qwen3_vl_cost_six_flop_per_weight(name: str, billions: float) -> None:
    made = preset(name)
    flops = spec_of(made).step_flops(made, False, ())
    assert (flops.per_token + flops.per_target) / 6e9 == pytest.approx(billions, rel=0.01)


def test_attention_by_hand() -> None:
    # 9b: 8 full layers, 16 heads of 256. Causal Q K^T and A V: 2 * 2 * 256 / 2 FLOP per head and pair; times 3.
    flops = step_flops(PRESETS["9b"], mtp=False)
    assert flops.per_token_squared == 3 * 8 * 16 * 2 * 256
    # Vision: 27 layers, width 1152, all pairs: 4 * 1152; times 3.
    assert flops.per_patch_squared == 3 * 27 * 4 * 1152
