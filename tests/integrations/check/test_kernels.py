"""What a check does with kernels of flash-linear-attention, without a GPU: stand-ins for Triton's autotuners."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integrations.tiny_models import tiny_model
from vlmdata.integrations.check.kernels import one_configuration, without_kernels

CUDA = torch.device("cuda")


class Autotuner(SimpleNamespace):
    """As Triton's: configurations, and the kernel."""


def config(warps: int, stages: int, **blocks: int) -> Any:
    return SimpleNamespace(num_warps=warps, num_stages=stages, kwargs=blocks)


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> Autotuner:
    """The autotuner of a kernel, behind what decorates it."""
    made = Autotuner(configs=[config(8, 2, BV=32), config(4, 3, BV=32), config(4, 2, BV=64), config(4, 2, BV=32)])
    for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule", "fla.modules", "fla.modules.conv", "fla.modules.l2norm"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["fla.modules.conv"].kernel = SimpleNamespace(fn=SimpleNamespace(fn=made))  # type: ignore[attr-defined]
    return made


def test_one_configuration_is_left_of_each_kernel(tuner: Autotuner) -> None:
    configs = tuner.configs
    with one_configuration(CUDA):
        assert tuner.configs == [config(4, 2, BV=32)]
    assert tuner.configs is configs
    with one_configuration(torch.device("cpu")):
        assert tuner.configs is configs


def test_exact_numbers_come_from_the_code_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3_5", num_hidden_layers=1, layer_types=["linear_attention"])
    module = sys.modules[type(model).__module__]
    own = module.torch_chunk_gated_delta_rule

    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a kernel")

    kernel.__wrapped__ = own  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", kernel)
    ids = torch.arange(5)[None] + 10
    with without_kernels(model):
        assert model(input_ids=ids, use_cache=False).logits.shape[1] == 5
    with pytest.raises(AssertionError, match="a kernel"):
        model(input_ids=ids, use_cache=False)
    with without_kernels(None):
        assert module.torch_chunk_gated_delta_rule is kernel
