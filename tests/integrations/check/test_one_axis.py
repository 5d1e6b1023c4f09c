"""``check`` with Gemma 4 and InternVL: healthy models, planted faults, and small models of large configurations."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.integrations.check import faults
from tests.integrations.tiny_models import ONE_AXIS, family_of, tiny_model
from vlmdata.batch import PackedBatch
from vlmdata.format.dataset import VlmDataset
from vlmdata.integrations import boundaries
from vlmdata.integrations.check import Checked, Leak, Result, check, check_data
from vlmdata.integrations.check.packs import CheckData
from vlmdata.integrations.reduced import reduced
from vlmdata.integrations.transformers import packed, packed_forward, packed_inputs

Data = Callable[[str], CheckData]


@pytest.fixture(scope="session")
def data(random_data: Callable[[str], Path]) -> Data:
    """Samples with no to two images or tiles, that fit one pack."""

    @cache
    def of(family: str) -> CheckData:
        return check_data(VlmDataset(random_data(family)), 1536 if family == "internvl" else 512)

    return lambda variant: of(family_of(variant))


def checked(variant: str, fault: Callable[[Any], faults.Forward], data: Data, **options: Any) -> Result:
    def build() -> Checked:
        model = tiny_model(variant, **_few_layers(variant))
        return Checked(model, fault(model))

    return check(build, data(variant), **options)


def _few_layers(variant: str) -> dict[str, Any]:
    """One or two decoder layers of each kind."""
    if variant.startswith("internvl"):
        return {"num_hidden_layers": 2}
    shared = variant == "gemma4-small"  # the second layer of each kind has the keys of the first
    kinds = ["sliding_attention", "full_attention"] * (1 + shared)
    return {"layer_types": kinds, "num_hidden_layers": len(kinds), "num_kv_shared_layers": 2 * shared}


@pytest.mark.parametrize("variant", ["gemma4-small", "internvl-qwen3"])
def test_a_healthy_forward_has_no_faults(variant: str, data: Data) -> None:
    """One of the user's own; below is that of vlmdata, for all models."""
    assert_equal(checked(variant, faults.healthy, data))


def assert_equal(result: Result) -> None:
    """No faults, and much that was compared."""
    assert not result.findings, result.findings
    found = {each.part: each.places for each in result.comparisons}
    assert found.keys() >= {"tokens", "images", "positions", "attention", "loss", "gradients"}
    assert found["images"] > 10
    assert all(each.error < each.tolerance for each in result.comparisons), result.comparisons


def positions_that_do_not_restart(model: Any) -> faults.Forward:
    def forward(batch: PackedBatch) -> Any:
        inputs = packed_inputs(batch) | {"position_ids": torch.arange(batch.total_tokens)[None]}
        with packed(model):
            return {"logits": model(**inputs).logits}

    return forward


def images_that_do_not_see_themselves(model: Any) -> faults.Forward:
    def forward(batch: PackedBatch) -> Any:
        with packed(model), mock.patch.object(boundaries, "runs_within", return_value=()):
            return packed_forward(model, batch).losses

    return forward


def swapped_image_features(model: Any) -> faults.Forward:
    own = type(model.model).get_image_features

    def swapped(*args: Any, **kwargs: Any) -> Any:
        found = own(model.model, *args, **kwargs)
        features = found.pooler_output
        found.pooler_output = features.flip(0) if isinstance(features, torch.Tensor) else features[::-1]
        return found

    def forward(batch: PackedBatch) -> Any:
        with packed(model), mock.patch.object(model.model, "get_image_features", swapped):
            return packed_forward(model, batch).losses

    return forward


def pixels_of_another_image(model: Any) -> faults.Forward:
    """Pixels with their places, one image further, among those that are padded alike."""

    def forward(batch: PackedBatch) -> Any:
        inputs = packed_inputs(batch)
        for name in ("pixel_values", "image_position_ids"):
            if name in inputs:
                inputs[name] = inputs[name].roll(1, dims=0)
        with packed(model):
            return {"logits": model(**inputs).logits}

    return forward


@pytest.mark.parametrize(
    ("fault", "variant", "kind", "crosses"),
    [
        (faults.attention_over_the_pack, "gemma4-dense", Leak.ATTENTION, True),
        (faults.attention_over_the_pack, "internvl-qwen3", Leak.ATTENTION, True),
        (positions_that_do_not_restart, "gemma4-small", Leak.POSITION, None),
        (positions_that_do_not_restart, "internvl-qwen3", Leak.POSITION, None),
        (images_that_do_not_see_themselves, "gemma4-dense", Leak.ATTENTION, False),
        (swapped_image_features, "gemma4-small", Leak.PIXELS, None),
        (swapped_image_features, "internvl-qwen3", Leak.PIXELS, None),
        (pixels_of_another_image, "gemma4-small", Leak.PIXELS, None),
        (pixels_of_another_image, "internvl-qwen3", Leak.PIXELS, None),
    ],
)
def test_a_planted_fault_is_named(
    fault: Callable[[Any], faults.Forward], variant: str, kind: Leak, crosses: bool | None, data: Data
) -> None:
    result = checked(variant, fault, data, gradients=False)
    kinds = [each.kind for each in result.findings]
    # Attention follows from positions that say nothing of samples.
    assert kinds == [kind] or (kind is Leak.POSITION and set(kinds) == {Leak.POSITION, Leak.ATTENTION}), result.findings
    named = next(each for each in result.findings if each.kind is kind)
    assert named.error > 10 * named.tolerance
    assert crosses is None or named.crosses is crosses, named


def test_a_small_model_keeps_every_kind_of_layer() -> None:
    """Of configurations as large as those on the hub, without their weights."""
    from transformers import Gemma4Config, InternVLConfig

    text = {"use_bidirectional_attention": "vision", "attention_k_eq_v": True, "num_global_key_value_heads": 1}
    large = Gemma4Config(text_config=text, vision_config={}, audio_config={})
    dense = reduced(large)
    assert dense.text_config.layer_types == ["sliding_attention", "full_attention"] * 2
    assert dense.audio_config is None
    for kind, heads in (("sliding_attention", 2), ("full_attention", 1)):
        one, other = (each.text_config.per_layer_config[kind] for each in (dense, large))
        assert (one.head_dim, one.num_key_value_heads) == (other.head_dim, heads)
    for name in ("use_bidirectional_attention", "sliding_window", "vocab_size"):
        assert getattr(dense.text_config, name) == getattr(large.text_config, name)
    assert dense.vision_config.head_dim == large.vision_config.head_dim
    shared = reduced(Gemma4Config(text_config={"num_kv_shared_layers": 10}, vision_config={}))
    assert shared.text_config.num_kv_shared_layers == 2
    experts = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
    found = reduced(Gemma4Config(text_config=experts, vision_config={})).text_config
    assert (found.num_experts, found.top_k_experts, found.moe_intermediate_size) == (8, 2, 64)
    tiled = reduced(InternVLConfig(text_config={"model_type": "qwen3", "head_dim": 128}))
    assert (tiled.text_config.head_dim, tiled.text_config.num_hidden_layers) == (128, 4)
    assert tuple(tiled.vision_config.image_size) == (448, 448)


@pytest.mark.parametrize("variant", list(ONE_AXIS))
def test_small_models_of_folders_have_no_faults(
    variant: str, random_data: Callable[[str], Path], tmp_path: Path
) -> None:
    from vlmdata.integrations.check.command import Options, check_named

    tiny_model(variant).config.save_pretrained(tmp_path)
    tokens = 1536 if variant.startswith("internvl") else 512
    options = Options(tokens, "float32", "cpu", False, None, True, False)
    subject, result = check_named(str(tmp_path), str(random_data(family_of(variant))), options)
    assert subject.model_type == variant.split("-")[0]
    assert_equal(result)
