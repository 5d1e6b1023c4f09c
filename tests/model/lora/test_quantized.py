"""A base in NF4 computes what transformers' model with the dequantized weights does, with PEFT's adapters."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")
pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

from tests.model.conftest import Pair
from tests.model.helpers import (
    mixed_samples,
    pack,
    relative,
    small_architecture,
    transformers_model,
    values_of,
    weights_of,
)
from tests.model.lora.test_peft_parity import TOLERANCE, adapted, loss_of, write
from vlmdata.model.architecture import MoeArchitecture
from vlmdata.model.lora.options import LoraOptions
from vlmdata.model.network.quantized import BLOCK, QuantizedWeights, device_of, held_by, is_quantized, value_of
from vlmdata.model.network.settings import ModelSettings, SettingError
from vlmdata.model.network.wrapping import is_of_wrapper
from vlmdata.model.weight_names.table import load_from_hf


def architecture_of(family: str, moe: bool) -> Any:
    """A small model whose rows are multiples of blocks."""
    made = small_architecture(family, moe=moe, **({"mtp": 0} if family == "qwen3_5" else {}))
    sizes = (
        {"moe": dataclasses.replace(made.language.moe, intermediate_size=128)} if moe else {"intermediate_size": 128}
    )
    if moe and made.language.moe.shared_expert_intermediate_size:
        sizes["moe"] = dataclasses.replace(sizes["moe"], shared_expert_intermediate_size=192)
    return dataclasses.replace(made, language=dataclasses.replace(made.language, **sizes))


def built(architecture: Any, weights: dict[str, torch.Tensor] | None = None, **settings: Any) -> Any:
    """Our model in NF4, with these weights or its own."""
    from vlmdata.model.families import spec_of

    spec = spec_of(architecture)
    model = spec.build(architecture, ModelSettings(storage="nf4", moe_aux_loss=0.0, **settings))
    if weights is not None:
        load_from_hf(model, spec.parameter_maps(architecture), lambda source: source.take(weights[source.name]))
    return model.train()


def pair_of(family: str, moe: bool, **settings: Any) -> Pair:
    """Ours in NF4, and transformers' with the dequantized weights."""
    from vlmdata.model.families import spec_of

    architecture = architecture_of(family, moe)
    ours = built(architecture, weights_of(architecture), **settings)
    weights = values_of(ours, architecture)
    maps = spec_of(architecture).parameter_maps(architecture)
    return Pair(architecture, ours, transformers_model(architecture, weights), weights, maps)


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_vl"])
def test_logits_and_gradients_on_dequantized_weights(one_process: None, family: str, moe: bool, tmp_path: Path) -> None:
    pair, samples = pair_of(family, moe, recompute="full" if family == "qwen3_vl" else "none"), mixed_samples()
    plain = weights_of(pair.architecture)
    quantized = {name for name, each in pair.ours.named_parameters() if is_quantized(each)}
    changed = {name for name, each in pair.weights.items() if not torch.equal(each, plain[name])}
    # Linear layers of the language model, and nothing else.
    assert {name.rpartition(".")[2] for name in quantized} == {"weight"}
    assert changed
    assert all("proj" in name and "visual" not in name and "conv1d" not in name for name in changed), sorted(changed)
    assert 0.05 < relative(pair.weights[min(changed)], plain[min(changed)]) < 0.15
    before = {name: [each.clone() for each in held_by(pair.ours.get_parameter(name))] for name in quantized}
    both = adapted(pair, LoraOptions(4, alpha=6.0, merger="lora"), tmp_path)
    batch = pack(samples, tail=24)
    with torch.no_grad():
        logits = pair.ours(dataclasses.replace(batch, labels=None))[0]
        for sample, start in zip(samples, batch.cu_seqlens_padded.tolist(), strict=False):
            wanted = both.theirs(**sample.transformers_inputs(), use_cache=False).logits[0]
            assert relative(logits[start : start + len(sample.ids)], wanted) < 1e-5
    pair.ours(batch).sum().backward()
    loss_of(both.theirs, samples).backward()
    of_theirs = {
        name.replace(".default.", "."): each for name, each in both.theirs.named_parameters() if each.requires_grad
    }
    found = write(pair, both.plan, tmp_path / "gradients", lambda parameter: parameter.grad)
    assert found.keys() == of_theirs.keys()
    for name, gradient in found.items():
        assert relative(gradient, of_theirs[name].grad) < TOLERANCE, name
    for name, tensors in before.items():
        for tensor, now in zip(tensors, held_by(pair.ours.get_parameter(name)), strict=True):
            assert torch.equal(tensor, now), name


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_vl"])
def test_equals_transformers_with_bitsandbytes(one_process: None, family: str, tmp_path: Path) -> None:
    """The same weights, quantized by transformers when it loads them, with the same adapter."""
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText, BitsAndBytesConfig

    architecture = architecture_of(family, moe=False)
    plain = weights_of(architecture)
    transformers_model(architecture, plain).save_pretrained(tmp_path / "base")
    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        llm_int8_skip_modules=["model.visual", "lm_head"],
    )
    theirs = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "base", quantization_config=how, dtype=torch.float32, device_map="cpu"
    )
    assert theirs.model.language_model.layers[-1].self_attn.q_proj.weight.dtype == torch.uint8
    ours = built(architecture, plain)
    pair = Pair(architecture, ours, transformers_model(architecture, plain), plain, None)
    adapted(pair, LoraOptions(4, alpha=6.0), tmp_path / "adapter")
    peer = PeftModel.from_pretrained(theirs, tmp_path / "adapter").train()  # in evaluation, it computes in bfloat16
    samples = mixed_samples()
    batch = pack(samples, tail=24)
    with torch.no_grad():
        logits = ours(dataclasses.replace(batch, labels=None))[0]
        for sample, start in zip(samples, batch.cu_seqlens_padded.tolist(), strict=False):
            wanted = peer(**sample.transformers_inputs(), use_cache=False).logits[0]
            assert relative(logits[start : start + len(sample.ids)], wanted) < 1e-5


def test_values_depend_on_their_block_alone(one_process: None) -> None:
    """So all layouts have the same, and a scale fits in the dtype of the weights."""
    whole = torch.randn(48, 4 * BLOCK, generator=torch.Generator().manual_seed(3))
    whole[5, :BLOCK] = 0
    for dtype in (torch.float32, torch.bfloat16):
        weight = whole.to(dtype)
        codes = QuantizedWeights([weight])
        assert codes.codes.nbytes + codes.scales.nbytes == weight.numel() * (4 + 8 * dtype.itemsize / BLOCK) / 8
        values = codes.value(0)
        for part in (values[16:32], values[:, BLOCK : 3 * BLOCK]):
            rows = slice(16, 32) if len(part) == 16 else slice(None)
            columns = slice(None) if len(part) == 16 else slice(BLOCK, 3 * BLOCK)
            assert torch.equal(QuantizedWeights([weight[rows, columns]]).value(0), part)
        # Quantizing values again changes nothing.
        assert torch.equal(QuantizedWeights([values]).value(0), values)
        several = QuantizedWeights([weight, values.flip(0)])
        assert torch.equal(several.value(), torch.stack([values, values.flip(0)]))
        assert torch.equal(several.value(1), values.flip(0))
        # bitsandbytes' own scales are float32.
        from bitsandbytes import functional

        theirs = functional.dequantize_4bit(*functional.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4"))
        assert torch.equal(values, theirs)
    assert not values[5, :BLOCK].any()


def test_autograd_keeps_no_dequantized_weight(one_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass makes it anew: a weight is not released before if autograd keeps it."""
    model = built(architecture_of("qwen3_5", moe=False))
    layer = model.language.decoder.layers[0].mlp.linear_fc1
    made: list[int] = []
    value = QuantizedWeights.value
    monkeypatch.setattr(QuantizedWeights, "value", lambda self, number=None: made.append(1) or value(self, number))
    x = torch.randn(3, 1, 64, requires_grad=True)
    out, _ = layer(x)
    assert len(made) == 1
    gradient = torch.randn_like(out)
    out.backward(gradient)
    assert len(made) == 2
    assert x.grad is not None
    assert relative(x.grad, gradient @ value_of(layer.weight)) < 1e-6
    assert layer.weight.is_meta
    assert device_of(model).type == "cpu"
    assert layer.to(torch.float32) is layer  # moving leaves the parameter on the meta device alone
    assert is_quantized(layer.weight)


def test_rows_that_are_no_blocks(one_process: None) -> None:
    with pytest.raises(
        SettingError, match=r"storage 'nf4' needs rows of a multiple of 64 values, but .* 64 x 96 on this"
    ):
        built(small_architecture("qwen3_5", mtp=0))
    made = architecture_of("qwen3_5", moe=True)
    other = dataclasses.replace(made, language=dataclasses.replace(made.language, moe=MoeArchitecture(4, 2, 40, 64)))
    with pytest.raises(SettingError, match="needs rows of a multiple of 64 values"):
        built(other)


def test_its_adapters_have_the_layers_device_and_dtype(one_process: None) -> None:
    from vlmdata.model.lora.attach import attach, plan_of

    architecture = architecture_of("qwen3_5", moe=True)
    model = built(architecture, precision="bf16")
    attach(model, plan_of(architecture, LoraOptions(4), mtp=False))
    wrappers = {name: each for name, each in model.named_parameters() if is_of_wrapper(name)}
    assert wrappers
    assert {(each.device.type, each.dtype, each.requires_grad) for each in wrappers.values()} == {
        ("cpu", torch.bfloat16, True)
    }
    assert any(bool(each.any()) for name, each in wrappers.items() if name.endswith(".a"))
