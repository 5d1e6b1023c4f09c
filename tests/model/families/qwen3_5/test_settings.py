"""Settings that cannot work are refused before anything is built, and so are batches of another rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.model.conftest import Pair
from tests.model.helpers import mixed_samples, pack, small_architecture

pytest.importorskip("megatron.core")

from vlmdata.model.families.qwen3_5.build import build_model, require_compiler
from vlmdata.model.families.qwen3_5.sizes import check
from vlmdata.model.network.settings import ModelSettings, SettingError, vocabulary_rows


@pytest.mark.parametrize(
    ("settings", "model", "message"),
    [
        ({"tensor_parallel": 3}, {}, "tensor_parallel 3 does not divide language.hidden_size 64"),
        ({"tensor_parallel": 0}, {}, "tensor_parallel must be at least 1, got 0"),
        ({"tensor_parallel": 2, "context_parallel": 4}, {}, r"\(8\) does not divide language.linear_num_key_heads 4"),
        ({"pipeline_parallel": 3}, {}, "pipeline_parallel 3 does not divide the 2 layers"),
        ({"expert_parallel": 2}, {}, "has no experts"),
        ({"expert_parallel": 3}, {"moe": True}, "does not divide the 4 experts"),
        ({"tensor_parallel": 2}, {"moe": True}, "need sequence_parallel"),
        ({"sequence_parallel": True}, {}, "needs tensor_parallel > 1"),
        ({"tensor_parallel": 4, "vision_tensor_parallel": 2}, {}, "must be 1 or tensor_parallel, 4, got 2"),
        ({"backend": "jax"}, {}, "backend must be one of torch, transformer_engine, got 'jax'"),
        ({"recompute": "some"}, {}, "recompute must be one of"),
        ({"precision": "fp16"}, {}, "precision must be one of fp32, bf16, got 'fp16'"),
        ({"mtp_layers": 2}, {}, "mtp_layers must be between 0 and the architecture's 1"),
        ({"mtp_layers": 1}, {"mtp": 0}, "mtp_layers must be between 0 and the architecture's 0"),
        (
            {"vision_attention": "flash"},
            {},
            "vision_attention must be one of auto, transformer_engine, flash_attention_4",
        ),
        ({"vision_attention": "transformer_engine"}, {}, "vision_attention needs backend 'transformer_engine'"),
        ({"vision_attention": "flash_attention_4"}, {}, "'flash_attention_4' computes in bfloat16, got fp32"),
        (
            {"vision_attention": "flash_attention_4", "precision": "bf16", "backend": "transformer_engine"},
            {},
            "'flash_attention_4' computes wrong gradients for heads of 12 columns",
        ),
        ({"fp8": "hybrid"}, {}, "fp8 needs backend 'transformer_engine'"),
        ({"fp8_recipe": "mxfp8"}, {}, "fp8_recipe must be one of tensorwise, delayed, blockwise, got 'mxfp8'"),
    ],
)
def test_settings_are_refused(settings: dict[str, Any], model: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(ModelSettings(**settings), small_architecture(**model))


def test_a_whole_tower_needs_no_divisible_sizes() -> None:
    odd = small_architecture()
    odd = dataclasses.replace(odd, vision=dataclasses.replace(odd.vision, num_heads=3))
    with pytest.raises(ValueError, match=r"tensor_parallel 4 does not divide vision\.num_heads 3"):
        check(ModelSettings(tensor_parallel=4), odd)
    check(ModelSettings(tensor_parallel=4, vision_tensor_parallel=1), odd)


def test_settings_must_match_the_groups(one_process: None) -> None:
    with pytest.raises(ValueError, match=r"context_parallel 2 differs from the process groups.*1"):
        build_model(small_architecture(), ModelSettings(context_parallel=2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA machines may have it")
def test_a_missing_back_end_is_named(one_process: None) -> None:
    with pytest.raises(ImportError, match=r"transformer-engine and flash-linear-attention.*backend 'torch'"):
        build_model(small_architecture(), ModelSettings(backend="transformer_engine"))


@pytest.mark.parametrize(("size", "tensor", "rows"), [(248320, 8, 248320), (6150, 4, 6208), (256, 1, 256), (1, 2, 32)])
def test_vocabulary_rows(size: int, tensor: int, rows: int) -> None:
    assert vocabulary_rows(size, tensor) == rows


@pytest.fixture(scope="module")
def pair(make_pair: Callable[..., Pair]) -> Pair:
    return make_pair()


def test_batches_of_other_ranks_are_refused(pair: Pair) -> None:
    with pytest.raises(ValueError, match="rank 0 of 1, but the batch is slice 1 of 2"):
        pair.ours(pack(mixed_samples()).context_parallel_shard(1, 2))


def test_missing_parts_are_named(pair: Pair) -> None:
    batch = pack(mixed_samples())
    with pytest.raises(ValueError, match="load the part 'tokens'"):
        pair.ours(dataclasses.replace(batch, input_ids=None))
    with pytest.raises(ValueError, match="load the part 'pixels'"):
        pair.ours(dataclasses.replace(batch, patches=None))
    with pytest.raises(ValueError, match="holds 9 rows of image patches, but the 4 images of this rank have"):
        pair.ours(dataclasses.replace(batch, patches=batch.patches[:9]))  # type: ignore[index]


def test_images_must_stand_where_the_ids_say(pair: Pair) -> None:
    batch = pack(mixed_samples())
    with pytest.raises(ValueError, match="with_vocabulary"):
        pair.ours(dataclasses.replace(batch, image_starts=batch.image_starts + 1, host=None))
    with pytest.raises(ValueError, match="outside the pack"):
        pair.ours(dataclasses.replace(batch, image_starts=batch.image_starts + 1000, host=None))


def test_aux_loss_needs_labels(make_pair: Callable[..., Pair]) -> None:
    moe = make_pair(moe=True)
    batch = dataclasses.replace(pack(mixed_samples()), labels=None)
    with pytest.raises(ValueError, match="load the part 'labels' on every pipeline stage"):
        moe.ours(batch)
    with torch.no_grad():
        moe.ours(batch)


def test_selective_recomputation_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    require_compiler(ModelSettings(recompute="full"))
    with pytest.raises(
        SettingError, match=r"recompute 'selective' .* ninja and c\+\+ cannot be found on PATH: install"
    ):
        require_compiler(ModelSettings(recompute="selective"))
    for tool in ("ninja", "c++"):
        (tmp_path / tool).touch(0o755)
    require_compiler(ModelSettings(recompute="selective"))
