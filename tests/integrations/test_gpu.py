"""Packs in transformers' models on a CUDA device: equal to samples, without masks, and checked for leaks."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.integrations.check import faults
from tests.integrations.comparing import expected_losses, with_images
from tests.integrations.tiny_models import MODELS, ONE_AXIS, family_of, inputs_of_sample, tiny_model
from vlmdata.batch import PackedBatch
from vlmdata.format.dataset import VlmDataset
from vlmdata.integrations import attention, delta_net
from vlmdata.integrations.check import Checked, Leak, check, check_data
from vlmdata.integrations.supported import pixel_dtype
from vlmdata.integrations.transformers import packed, packed_inputs, token_losses
from vlmdata.model.kernels.configurations import choose_configurations

#: Functions of transformers' delta nets that a package may replace.
KERNELS = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "causal_conv1d_fn",
    "causal_conv1d_update",
)
LINEAR = ("qwen3_5", "qwen3_5_moe")
ATTENTIONS = ["sdpa", "eager", "flash_attention_2", "flash_attention_3", "flash_attention_4"]
Packs = Callable[[str], list[PackedBatch]]
Samples = Callable[[str], VlmDataset]

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
needs_fla = pytest.mark.skipif(find_spec("fla") is None, reason="needs flash-linear-attention")


@pytest.fixture(scope="session", autouse=True)
def _few_configurations() -> None:
    """Else Triton's autotuner compiles 179 configurations of the delta net's kernels, for minutes."""
    if find_spec("fla") is not None:
        choose_configurations(128, 128, torch.cuda.get_device_capability())


def sizes_of(model_type: str) -> dict[str, int]:
    """Heads that kernels take: with 64 columns, Triton 3.6 miscompiles gradients of flash-linear-attention.

    Gemma's are those of the published sizes: 256 in layers with a window, 512, too many for the kernel, in others.
    """
    if model_type.startswith("gemma4"):
        return {"head_dim": 256, "global_head_dim": 512}
    return {"linear_key_head_dim": 128, "linear_value_head_dim": 128} if model_type in LINEAR else {}


def model_on_gpu(model_type: str, implementation: str = "sdpa", **text: Any) -> Any:
    model = tiny_model(model_type, **sizes_of(model_type), **text).to("cuda", torch.bfloat16)
    try:
        model.set_attn_implementation(implementation)
    except (ImportError, ValueError) as error:
        pytest.skip(str(error)[:200])
    return model


@contextmanager
def code_of_transformers(model: Any) -> Iterator[None]:
    """transformers' own functions of a delta net, which run on CPUs, in the place of installed kernels."""
    module = sys.modules[type(model).__module__]
    own = {name: inspect.unwrap(vars(module)[name]) for name in KERNELS if name in vars(module)}
    with mock.patch.multiple(module, **own) if own else nullcontext():
        yield


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: each.grad.float().cpu() for name, each in model.named_parameters() if each.grad is not None}


def logits_of_samples(model: Any, batch: PackedBatch, dataset: VlmDataset) -> torch.Tensor:
    """The logits of all real tokens, (tokens, vocabulary)."""
    found = []
    for origin in batch.origins:
        model.model.rope_deltas = None
        found.append(model(**inputs_of_sample(model, dataset[origin.index]), use_cache=False).logits[0].float())
    return torch.cat(found)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.detach().cpu() - other.detach().cpu()).norm())


@pytest.mark.parametrize(
    ("model_type", "implementation"),
    [(model_type, implementation) for model_type in MODELS for implementation in ATTENTIONS]
    + [(model_type, implementation) for model_type in ONE_AXIS for implementation in ("sdpa", "eager")],
)
def test_packs_are_as_near_to_float32_as_samples_in_bfloat16(
    model_type: str, implementation: str, packs: Packs, samples: Samples
) -> None:
    """Logits, losses and gradients: at most twice the error of the samples one by one, in bfloat16 on the CPU."""
    batch, dataset = with_images(packs(model_type)), samples(model_type)
    assert batch.loss_weights is not None
    weights = batch.loss_weights[0]
    exact = tiny_model(model_type, **sizes_of(model_type))
    model = model_on_gpu(model_type, implementation)
    found: list[tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]] = []
    with code_of_transformers(exact):
        for _ in range(2):
            losses = expected_losses(exact, batch, dataset)
            (losses * weights).sum().backward()
            with torch.no_grad():
                found.append((losses.float(), logits_of_samples(exact, batch, dataset), gradients_of(exact)))
            exact = exact.to(torch.bfloat16)
            exact.zero_grad()
    with packed(model):
        losses = token_losses(model, batch)
        (losses * weights.cuda()).sum().backward()
        with torch.no_grad():
            logits = model(**packed_inputs(batch.to("cuda"), pixel_dtype(model))).logits[0].float().cpu()
    real = ~batch.padding_mask[0]
    (losses_32, logits_32, gradients_32), (losses_16, logits_16, gradients_16) = found
    assert distance(losses, losses_32) <= 2 * distance(losses_16, losses_32)
    assert distance(logits[real], logits_32) <= 2 * distance(logits_16, logits_32)
    gradients = gradients_of(model)
    assert gradients.keys() == gradients_32.keys()
    ours = sum(distance(gradients[name], gradients_32[name]) ** 2 for name in gradients) ** 0.5
    theirs = sum(distance(gradients_16[name], gradients_32[name]) ** 2 for name in gradients) ** 0.5
    assert ours <= 2 * theirs


@pytest.mark.parametrize("model_type", MODELS)
def test_one_call_of_a_kernel_computes_each_attention(
    model_type: str, packs: Packs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no SDPA, neither with a mask of all tokens nor segment by segment, and no mask is made."""
    batch, model, calls = with_images(packs(model_type)), model_on_gpu(model_type), []
    kernel = attention.installed_kernel()
    assert kernel is not None

    def counted(q: Any, k: Any, v: Any, bounds: torch.Tensor, longest: int, causal: bool, scale: Any) -> Any:
        assert bounds.dtype == torch.int32
        assert longest == int(bounds.diff().max())
        calls.append((causal, len(bounds) - 1))
        return kernel(q, k, v, bounds, longest, causal, scale)

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("not the kernel")

    monkeypatch.setattr(attention, "installed_kernel", lambda: counted)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", refused)
    monkeypatch.setattr("transformers.masking_utils.sdpa_mask", refused)
    with packed(model):
        token_losses(model, batch).sum().backward()
    kinds = getattr(model.config.text_config, "layer_types", None) or ["full_attention"] * 4
    assert calls.count((True, len(batch.cu_seqlens_padded) - 1)) == kinds.count("full_attention")
    assert len([causal for causal, _ in calls if not causal]) == model.config.vision_config.depth
    assert calls.count((False, len(batch.image_grid_thw))) >= 1


@pytest.mark.parametrize("model_type", ["gemma4-dense", "gemma4-small", "internvl-qwen3"])
def test_kernels_compute_windows_and_images_that_see_themselves(
    model_type: str, packs: Packs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call per layer with a window, and one more for images; no mask of the decoder is made."""
    batch, model, calls = with_images(packs(model_type)), model_on_gpu(model_type), []
    kernel = attention.installed_kernel()
    assert kernel is not None

    def counted(q: Any, k: Any, v: Any, bounds: Any, longest: int, causal: bool, scale: Any, **more: Any) -> Any:
        calls.append((causal, more.get("left", -1)))
        return kernel(q, k, v, bounds, longest, causal, scale, **more)

    monkeypatch.setattr(attention, "installed_kernel", lambda: counted)
    monkeypatch.setattr("transformers.masking_utils.create_causal_mask", None)
    monkeypatch.setattr("vlmdata.integrations.windows.SlidingWindows._mask", None)
    with packed(model):
        token_losses(model, batch).sum().backward()
    kinds = model.config.text_config.layer_types
    windows = kinds.count("sliding_attention")
    wanted = [(True, 23)] * windows + [(False, 23)] * (windows if model_type == "gemma4-dense" else 0)
    wanted += [(True, -1)] * (kinds.count("full_attention") if model_type == "internvl-qwen3" else 0)
    assert sorted(calls) == sorted(wanted)


def waits(model: Any, batch: PackedBatch) -> int:
    """How often the host waits for the device in a step, warmed up."""
    for _ in range(2):
        token_losses(model, batch).sum().backward()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            token_losses(model, batch).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(each.message) for each in said)


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl", pytest.param("qwen3_5", marks=needs_fla)])
def test_no_layer_waits_for_the_device(model_type: str, packs: Packs) -> None:
    counts = []
    for layers in (2, 6):
        kinds = {"layer_types": ["linear_attention", "full_attention"] * (layers // 2)} if "3_5" in model_type else {}
        model = model_on_gpu(model_type, num_hidden_layers=layers, **kinds)
        with packed(model):
            counts.append(waits(model, with_images(packs(model_type)).to("cuda")))
    assert counts[1] <= counts[0], counts  # the first model of a process may wait once more


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen3_5"])
def test_autocast_and_float32(model_type: str, dtype: torch.dtype, packs: Packs, samples: Samples) -> None:
    """Weights in float32, as trainers have them: by themselves, without the kernel, and under autocast, with it."""
    batch, dataset = with_images(packs(model_type)), samples(model_type)
    exact, model = (tiny_model(model_type, **sizes_of(model_type)) for _ in range(2))
    with torch.no_grad(), code_of_transformers(exact):
        truth = expected_losses(exact, batch, dataset)
        rounded = expected_losses(exact.to(torch.bfloat16), batch, dataset).float()
    with packed(model.cuda()), torch.autocast("cuda", torch.bfloat16, enabled=dtype != torch.float32):
        losses = token_losses(model, batch)
    losses.sum().backward()
    share = 0.5 if dtype == torch.float32 and model_type == "qwen3_vl" else 2  # the delta rule's kernels use TF32
    assert distance(losses, truth) <= share * distance(rounded, truth)


@needs_fla
def test_kernels_of_flash_linear_attention_follow_boundaries(packs: Packs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The delta rule and the convolution run once per layer, and nothing is laid out with gaps."""
    model: Any = model_on_gpu("qwen3_5")
    rule = delta_net._delta_rule(model.model.language_model.layers[0].linear_attn)
    assert delta_net.follows_boundaries(rule, "cuda")
    calls: list[int] = []
    kernel = delta_net._convolution_kernel()

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(kwargs["cu_seqlens"]) - 1)
        return kernel(*args, **kwargs)

    monkeypatch.setattr(delta_net, "_convolution_kernel", lambda: counted)
    monkeypatch.setattr("vlmdata.integrations.segments.Segments.apart", None)
    batch = with_images(packs("qwen3_5"))
    module = sys.modules[type(model).__module__]
    before = module.causal_conv1d_fn
    with packed(model):
        token_losses(model, batch).sum().backward()
    assert calls == [len(batch.cu_seqlens_padded) - 1] * 2
    assert module.causal_conv1d_fn is before


#: Models with one axis of positions, except those with experts.
CHECKED = ("gemma4-dense", "gemma4-small", "internvl-qwen3")
#: Each fault, and a model for it.
PLANTED = [
    (faults.no_cu_seqlens_in_the_delta_rule, "qwen3_5", [Leak.STATE]),
    (faults.no_borders_in_the_convolution, "qwen3_5", [Leak.CONVOLUTION]),
    *((faults.attention_over_the_pack, model_type, [Leak.ATTENTION]) for model_type in (*MODELS, *CHECKED)),
    (faults.swapped_image_features, "qwen3_vl", [Leak.PIXELS]),
    (faults.stale_lengths, "qwen2_5_vl", [Leak.STALE]),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
class TestCheckModel:
    @pytest.fixture
    def found(self, random_data: Callable[[str], Path], dtype: torch.dtype) -> Callable[..., list[Leak]]:
        def of(fault: Callable[[Any], faults.Forward], model_type: str, gradients: bool) -> list[Leak]:
            few: dict[str, Any] = {} if model_type in ONE_AXIS else {"num_hidden_layers": 2}
            if model_type in LINEAR:
                few["layer_types"] = ["linear_attention", "full_attention"]

            def build() -> Checked:
                model = tiny_model(model_type, **few, **sizes_of(model_type))
                return Checked(model, fault(model))

            tokens = 1536 if model_type.startswith("internvl") else 512
            data = check_data(VlmDataset(random_data(family_of(model_type))), tokens)
            result = check(build, data, dtype, "cuda", gradients=gradients)
            return [each.kind for each in result.findings]

        return cache(of)

    @pytest.mark.parametrize("model_type", [*MODELS, *CHECKED])
    def test_a_healthy_model_has_no_faults(self, model_type: str, found: Callable[..., list[Leak]]) -> None:
        assert found(faults.healthy, model_type, True) == []

    @pytest.mark.parametrize(("fault", "model_type", "kinds"), PLANTED)
    def test_a_planted_fault_is_named(
        self,
        fault: Callable[[Any], faults.Forward],
        model_type: str,
        kinds: list[Leak],
        found: Callable[..., list[Leak]],
    ) -> None:
        assert found(fault, model_type, False) == kinds
