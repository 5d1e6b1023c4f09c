"""The two layouts of Qwen3-VL's experts in checkpoints: as published, and as transformers writes them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from safetensors.torch import load_file, save_file
from transformers import Qwen3VLMoeForConditionalGeneration

from tests.model.helpers import small_architecture, weights_of
from vlmdata.model.families import architecture_to_hf, spec_of
from vlmdata.model.network.settings import ModelSettings
from vlmdata.model.weights.convert import to_hf, to_megatron
from vlmdata.model.weights.hf_files import WeightsError
from vlmdata.model.weights.hf_load import fill_from_folder

pytestmark = [pytest.mark.usefixtures("one_process"), pytest.mark.slow]

#: Inner sizes of an expert with hidden size 64: no matrix is square, gate_up_proj is, down_proj is.
SIZES = {"none": 40, "gate_up_proj": 32, "down_proj": 64}
LAYER = "model.language_model.layers.1.mlp.experts."
square = pytest.mark.parametrize("square", SIZES)


def architecture_of(square: str) -> Any:
    made = small_architecture("qwen3_vl", moe=True)
    moe = dataclasses.replace(made.language.moe, intermediate_size=SIZES[square])
    return dataclasses.replace(made, language=dataclasses.replace(made.language, moe=moe))


def published(folder: Path, architecture: Any) -> dict[str, torch.Tensor]:
    """A checkpoint with experts as (experts, in, out), as published ones are."""
    weights = weights_of(architecture)
    width, inner = architecture.language.hidden_size, architecture.language.moe.intermediate_size
    generator = torch.Generator().manual_seed(7)
    for name in weights:
        if ".experts." in name:
            shape = (4, width, 2 * inner) if "gate_up" in name else (4, inner, width)
            weights[name] = torch.randn(shape, generator=generator) * 0.05
    write(folder, architecture, weights)
    return weights


def write(folder: Path, architecture: Any, weights: dict[str, torch.Tensor]) -> None:
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(architecture_to_hf(architecture)))


def experts_of(folder: Path, architecture: Any) -> dict[str, torch.Tensor]:
    """The experts' matrices of all layers of our model, as (out, in), after a direct load."""
    model: Any = spec_of(architecture).build(architecture, ModelSettings())
    fill_from_folder(model, folder, architecture)
    found = {name: each.detach() for name, each in model.named_parameters() if ".local_experts." in name}
    assert len(found) == 4 * 4 * 2
    return found


def experts_in(model: Any) -> dict[str, torch.Tensor]:
    """The same of transformers' model."""
    found = {}
    for number, layer in enumerate(model.model.language_model.layers):
        for expert in range(4):
            ours = f"language.decoder.layers.{number}.mlp.experts.local_experts.{expert}."
            found[ours + "linear_fc1.weight"] = layer.mlp.experts.gate_up_proj[expert].detach()
            found[ours + "linear_fc2.weight"] = layer.mlp.experts.down_proj[expert].detach()
    return found


def require_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@square
def test_a_checkpoint_that_transformers_saved_is_read(tmp_path: Path, square: str) -> None:
    architecture = architecture_of(square)
    published(tmp_path / "hub", architecture)
    theirs = Qwen3VLMoeForConditionalGeneration.from_pretrained(tmp_path / "hub")
    theirs.save_pretrained(tmp_path / "saved")
    assert tuple(load_file(tmp_path / "saved" / "model.safetensors")[LAYER + "down_proj"].shape)[1] == 64
    require_equal(experts_of(tmp_path / "saved", architecture), experts_in(theirs))


@square
def test_a_published_checkpoint_is_read(tmp_path: Path, square: str) -> None:
    """The matrix that is not square tells how the other one lies."""
    architecture = architecture_of(square)
    weights = published(tmp_path / "hub", architecture)
    found = experts_of(tmp_path / "hub", architecture)
    for kind, name in (("linear_fc1", "gate_up_proj"), ("linear_fc2", "down_proj")):
        parameter = found[f"language.decoder.layers.1.mlp.experts.local_experts.2.{kind}.weight"]
        assert torch.equal(parameter, weights[LAYER + name][2].T)


@square
def test_an_export_is_read_by_transformers_and_here(tmp_path: Path, square: str) -> None:
    architecture = architecture_of(square)
    published(tmp_path / "hub", architecture)
    ours = experts_of(tmp_path / "hub", architecture)
    to_megatron(tmp_path / "hub", tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back")
    require_equal(experts_in(Qwen3VLMoeForConditionalGeneration.from_pretrained(tmp_path / "back")), ours)
    require_equal(experts_of(tmp_path / "back", architecture), ours)


def test_an_export_has_the_published_layout_unless_a_matrix_is_square(tmp_path: Path) -> None:
    for square, shape in {"none": (4, 64, 80), "gate_up_proj": (4, 64, 64), "down_proj": (4, 128, 64)}.items():
        table = spec_of(architecture_of(square)).parameter_maps(architecture_of(square), mtp=False)
        entry = table["language.decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight"]
        assert entry.sources[0].shape == shape


def test_a_shape_of_neither_layout_is_named(tmp_path: Path) -> None:
    architecture = architecture_of("none")
    weights = published(tmp_path / "hub", architecture)
    write(tmp_path / "odd", architecture, weights | {LAYER + "gate_up_proj": torch.zeros(4, 64, 72)})
    with pytest.raises(WeightsError, match=rf"{LAYER}gate_up_proj is \[4, 64, 72\], but the model needs \[4, 64, 80\]"):
        experts_of(tmp_path / "odd", architecture)
