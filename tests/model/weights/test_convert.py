"""Conversion of weights: exact both ways, one tensor at a time, and nothing wrong goes through."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core import dist_checkpointing
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tests.model.helpers import as_in_memory, small_architecture, weights_of
from vlmdata.cli.main import app
from vlmdata.errors import UsageError, VlmdataError
from vlmdata.model.families import architecture_to_hf, spec_of
from vlmdata.model.network.settings import ModelSettings
from vlmdata.model.weight_names.table import canonical_names
from vlmdata.model.weights.convert import to_hf, to_megatron
from vlmdata.model.weights.hf_files import HfTensors, PlannedTensor, WeightsError, write_tensors

pytestmark = [pytest.mark.usefixtures("one_process"), pytest.mark.slow]

KINDS: dict[str, dict[str, Any]] = {
    "dense": {"moe": False, "tied": False, "mtp": 1},
    "tied": {"moe": False, "tied": True, "mtp": 1},
    "without_mtp": {"moe": False, "tied": True, "mtp": 0},
    "experts": {"moe": True, "tied": False, "mtp": 1},
    "qwen3_vl": {"family": "qwen3_vl", "tied": True},
    "qwen3_vl_experts": {"family": "qwen3_vl", "moe": True},
}


def hf_folder(folder: Path, kind: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, dict[str, torch.Tensor]]:
    """A Hugging Face checkpoint in two files."""
    architecture = small_architecture(**KINDS[kind])
    weights = {name: each.to(dtype).contiguous() for name, each in weights_of(architecture).items()}
    weights[next(iter(weights))] = weights[next(iter(weights))].float()  # published files mix dtypes
    write_folder(folder, architecture, weights)
    return architecture, weights


def write_folder(folder: Path, architecture: Any, weights: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(weights)
    half = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in half.items():
        save_file({name: weights[name] for name in part}, folder / file)
    where = {name: file for file, part in half.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "config.json").write_text(json.dumps(architecture_to_hf(architecture)))
    (folder / "tokenizer.json").write_text("{}")


@pytest.fixture(scope="module", params=list(KINDS))
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A checkpoint converted there and back."""
    root = tmp_path_factory.mktemp(request.param)
    architecture, weights = hf_folder(root / "hf", request.param)
    to_megatron(root / "hf", root / "megatron")
    to_hf(root / "megatron", root / "back", like=root / "hf", file_bytes=200_000)
    return root, architecture, weights


def test_the_round_trip_is_exact(converted: Any) -> None:
    root, _, weights = converted
    files = sorted((root / "back").glob("*.safetensors"))
    assert len(files) > 1
    back = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert back.keys() == weights.keys()
    for name, tensor in weights.items():
        assert back[name].dtype == tensor.dtype, name
        assert torch.equal(back[name], tensor), name


def test_the_index_names_every_file(converted: Any) -> None:
    root, _, weights = converted
    index = json.loads((root / "back" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == weights.keys()
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in weights.values())
    for name, file in index["weight_map"].items():
        with safe_open(root / "back" / file, framework="pt") as opened:
            assert name in opened.keys()  # noqa: SIM118


def test_other_files_come_along(converted: Any) -> None:
    root, architecture, _ = converted
    assert (root / "back" / "tokenizer.json").read_text() == "{}"
    assert json.loads((root / "back" / "config.json").read_text()) == {
        **architecture_to_hf(architecture),
        "dtype": "bfloat16",
    }


def test_a_model_loads_it_through_megatron_core(converted: Any) -> None:
    root, architecture, weights = converted
    model: Any = spec_of(architecture).build(architecture, ModelSettings())
    loaded = dist_checkpointing.load(model.sharded_state_dict(), str(root / "megatron"))
    missing, unexpected = model.load_state_dict(loaded, strict=False)
    assert not [name for name in (*missing, *unexpected) if "_extra_state" not in name]
    rows = model.language.embedding.word_embeddings.weight.shape[0]
    maps = spec_of(architecture).parameter_maps(architecture, vocab_rows=rows)
    names = canonical_names(model)
    for name, parameter in model.named_parameters():
        entry = maps[names[name]]
        expected = entry.to_mcore([source.take(weights[source.name]) for source in entry.sources])
        assert torch.equal(parameter, expected.float()), name


@pytest.mark.parametrize("kind", ["tied", "qwen3_vl", "qwen3_vl_experts"])
def test_transformers_loads_what_comes_back(tmp_path: Path, kind: str) -> None:
    """Through its own ``from_pretrained``, which turns the experts of Qwen3-VL's files."""
    from transformers import AutoModelForImageTextToText

    architecture, weights = hf_folder(tmp_path / "hf", kind, torch.float32)
    to_megatron(tmp_path / "hf", tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "back", dtype=torch.float32)
    state = as_in_memory(architecture, model.state_dict())
    for name, tensor in weights.items():
        if not name.startswith("mtp."):
            assert torch.equal(state[name], tensor), name


def test_experts_that_are_published_one_by_one(tmp_path: Path) -> None:
    architecture, weights = hf_folder(tmp_path / "fused", "experts")
    single = {}
    for name, tensor in weights.items():
        prefix, fused, _ = name.partition("experts.gate_up_proj")
        if fused:
            for number, expert in enumerate(tensor):
                gate, up = expert.chunk(2)
                single[f"{prefix}experts.{number}.gate_proj.weight"] = gate.contiguous()
                single[f"{prefix}experts.{number}.up_proj.weight"] = up.contiguous()
        elif name.endswith("experts.down_proj"):
            single |= {f"{name.removesuffix('down_proj')}{n}.down_proj.weight": e for n, e in enumerate(tensor)}
        else:
            single[name] = tensor
    write_folder(tmp_path / "single", architecture, {name: each.clone() for name, each in single.items()})
    to_megatron(tmp_path / "single", tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back")
    back = HfTensors(tmp_path / "back")
    for name, tensor in weights.items():
        assert torch.equal(back.read(name), tensor), name


class TestWhatIsWrongIsListed:
    def changed(self, folder: Path, change: Any) -> str:
        architecture, weights = hf_folder(folder / "hf", "dense")
        change(weights)
        write_folder(folder / "hf", architecture, weights)
        with pytest.raises(WeightsError) as error:
            to_megatron(folder / "hf", folder / "megatron")
        assert not (folder / "megatron").exists()
        return str(error.value)

    def test_missing_unexpected_and_mis_shaped(self, tmp_path: Path) -> None:
        def change(weights: dict[str, torch.Tensor]) -> None:
            del weights["lm_head.weight"]
            weights["model.extra"] = torch.zeros(3)
            weights["model.language_model.norm.weight"] = torch.zeros(5)

        message = self.changed(tmp_path, change)
        assert "disagree in 3 tensors" in message
        assert "missing: lm_head.weight [" in message
        assert "unexpected: model.extra [3]" in message
        assert "shape: model.language_model.norm.weight is [5], but the model needs [" in message

    def test_a_dtype_that_is_no_weight(self, tmp_path: Path) -> None:
        def change(weights: dict[str, torch.Tensor]) -> None:
            weights["lm_head.weight"] = weights["lm_head.weight"].to(torch.float8_e4m3fn)

        assert "lm_head.weight is F8_E4M3, not one of F32, BF16, F16" in self.changed(tmp_path, change)

    def test_a_file_that_is_cut(self, tmp_path: Path) -> None:
        hf_folder(tmp_path, "dense")
        file = tmp_path / "model-00002-of-00002.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        with pytest.raises(WeightsError, match=r"model-00002-of-00002.safetensors: cannot be read"):
            to_megatron(tmp_path, tmp_path / "out")

    def test_a_file_that_is_gone(self, tmp_path: Path) -> None:
        hf_folder(tmp_path, "dense")
        (tmp_path / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(WeightsError, match=r"missing or truncated: model-00002-of-00002.safetensors"):
            to_megatron(tmp_path, tmp_path / "out")

    def test_no_config(self, tmp_path: Path) -> None:
        with pytest.raises(WeightsError, match=r"no readable config.json"):
            to_hf(tmp_path, tmp_path / "out")

    def test_a_config_that_is_no_qwen35_vl(self, tmp_path: Path) -> None:
        architecture, _ = hf_folder(tmp_path, "dense")
        config = architecture_to_hf(architecture)
        config["text_config"]["hidden_act"] = "relu"
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(WeightsError, match=r"config.json: .*hidden_act"):
            to_megatron(tmp_path, tmp_path / "out")

    def test_a_model_to_be_like_that_is_not_there(self, tmp_path: Path) -> None:
        from vlmdata.model.weights.command import _direction

        (tmp_path / ".metadata").touch()
        with pytest.raises(VlmdataError, match=r"--like nowhere is not a folder of a Hugging Face checkpoint"):
            _direction(tmp_path, tmp_path / "out", Path("nowhere"), None, None)

    def test_a_checkpoint_in_which_a_bit_changed(self, tmp_path: Path) -> None:
        hf_folder(tmp_path / "hf", "dense")
        to_megatron(tmp_path / "hf", tmp_path / "megatron")
        file = tmp_path / "megatron" / "__0_0.distcp"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        with pytest.raises(WeightsError, match=r"__0_0\.distcp changed after it was written"):
            to_hf(tmp_path / "megatron", tmp_path / "out")
        (tmp_path / "megatron" / "checksums-00000.json").unlink()
        assert to_hf(tmp_path / "megatron", tmp_path / "out").unchecked == 2

    def test_a_checkpoint_of_another_model(self, tmp_path: Path) -> None:
        hf_folder(tmp_path / "hf", "dense")
        to_megatron(tmp_path / "hf", tmp_path / "megatron")
        other = architecture_to_hf(small_architecture(moe=False, tied=True, mtp=1))
        (tmp_path / "megatron" / "config.json").write_text(json.dumps(other))
        with pytest.raises(WeightsError, match=r"unexpected: language.output_layer.weight"):
            to_hf(tmp_path / "megatron", tmp_path / "out")


def test_written_files_are_what_safetensors_reads(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(0, 4), "c": torch.tensor(2.5).bfloat16()}
    planned = {name: PlannedTensor(tuple(each.shape), each.dtype) for name, each in tensors.items()}
    (file,) = write_tensors(tmp_path, planned, tensors.__getitem__, 10**9)
    back = load_file(file)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)


#: A model of many equal tensors: each 4 MiB, 200 MiB in all.
_MEMORY = """
import resource, sys
from pathlib import Path
import torch
from vlmdata.model.parallel import cpu_mode, groups
from vlmdata.model.weights.convert import to_hf, to_megatron
groups.initialize(backend="gloo")
folder = Path(sys.argv[1])
with cpu_mode.cpu_mode_if_needed():
    to_megatron(folder / "small", folder / "warm")
    to_hf(folder / "warm", folder / "warm_back")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    to_megatron(folder / "large", folder / "megatron")
    to_hf(folder / "megatron", folder / "back")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def test_memory_is_bounded_by_the_largest_tensor(tmp_path: Path) -> None:
    import dataclasses

    hf_folder(tmp_path / "small", "dense")
    small = small_architecture(**KINDS["dense"])
    types = small.language.layer_types * 24
    language = dataclasses.replace(small.language, intermediate_size=8_192, layer_types=types)
    large = dataclasses.replace(small, language=language)
    weights = weights_of(large)
    largest = max(each.nbytes for each in weights.values()) / 2**20
    total, most = sum(each.nbytes for each in weights.values()) / 2**20, 8 * largest + 40
    assert total > 2 * most
    write_folder(tmp_path / "large", large, weights)
    del weights
    command = [sys.executable, "-W", "ignore", "-c", _MEMORY, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3])
    grown = float(done.stdout.splitlines()[-1])
    # Both halves of a fused tensor, their join, and what the allocator keeps.
    assert grown < most, (grown, largest, total)


def test_a_bucket_is_refused_as_the_place_of_weights(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["convert", str(tmp_path), "--out", "s3://bucket/weights"])
    assert isinstance(result.exception, UsageError)
    assert "--out s3://bucket/weights: checkpoints are written to local folders" in str(result.exception)


def test_a_file_is_refused_as_the_place_of_weights(tmp_path: Path) -> None:
    (file := tmp_path / "weights").touch()
    result = CliRunner().invoke(app, ["convert", str(tmp_path), "--out", str(file)])
    assert str(result.exception) == f"--out {file} is a file. It must be an empty folder, or absent."
