"""Packs in transformers' models on a CUDA device, in bfloat16: with SDPA, flash attention, flash-linear-attention."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.integrations.test_transformers import expected_losses, with_images
from tests.integrations.tiny_models import MODELS, tiny_model
from vlmdata.batch import PackedBatch
from vlmdata.format.dataset import VlmDataset
from vlmdata.integrations import delta_net
from vlmdata.integrations.transformers import packed, token_losses

#: Functions of transformers' delta nets that a package may replace.
KERNELS = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "causal_conv1d_fn",
    "causal_conv1d_update",
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4"])
@pytest.mark.parametrize("model_type", MODELS)
def test_losses_are_as_near_as_those_of_samples_in_bfloat16(
    model_type: str,
    attention: str,
    packs: Callable[[str], list[PackedBatch]],
    samples: Callable[[str], VlmDataset],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pack's error against float32 is at most twice that of its samples one by one, in bfloat16 on the CPU."""
    batch, dataset = with_images(packs(model_type)), samples(model_type)
    sizes = {"linear_key_head_dim": 64, "linear_value_head_dim": 64} if "3_5" in model_type else {}
    exact = tiny_model(model_type, **sizes)
    model = tiny_model(model_type, **sizes).to("cuda", torch.bfloat16)
    try:
        model.set_attn_implementation(attention)
    except (ImportError, ValueError) as error:
        pytest.skip(str(error)[:200])
    with torch.no_grad():
        with monkeypatch.context() as plain:
            for name, function in vars(sys.modules[type(exact).__module__]).copy().items():
                if name in KERNELS:  # where flash-linear-attention is installed, they are its kernels, also on CPUs
                    plain.setattr(sys.modules[type(exact).__module__], name, inspect.unwrap(function))
            truth = expected_losses(exact, batch, dataset)
            rounded = expected_losses(exact.to(torch.bfloat16), batch, dataset).float()
        with packed(model):
            losses = token_losses(model, batch).cpu()
    assert float((losses - truth).norm()) <= 2 * float((rounded - truth).norm())


@pytest.mark.skipif(find_spec("fla") is None, reason="needs flash-linear-attention")
def test_kernels_of_flash_linear_attention_follow_boundaries() -> None:
    model: Any = tiny_model("qwen3_5")
    assert delta_net.follows_boundaries(delta_net._delta_rule(model.model.language_model.layers[0].linear_attn), "cuda")
