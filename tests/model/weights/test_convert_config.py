"""The config of a converted checkpoint: nothing of the original is lost, and transformers loads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("megatron.core")

from tests.model.helpers import random_weights, small_architecture, transformers_model
from vlmdata.model.families import architecture_to_hf
from vlmdata.model.families.qwen3_5.names import parameter_maps
from vlmdata.model.training.build import architecture_of
from vlmdata.model.training.settings.config import ConfigError
from vlmdata.model.training.settings.config_loading import load_config
from vlmdata.model.weight_names.table import hf_names
from vlmdata.model.weights.convert import to_hf, to_megatron
from vlmdata.model.weights.hf_files import WeightsError

pytestmark = pytest.mark.usefixtures("one_process")


@pytest.fixture(scope="module", params=["dense", "experts"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that transformers saved in bf16, with settings that no architecture holds; and converted."""
    root = tmp_path_factory.mktemp(request.param)
    architecture = small_architecture(moe=request.param == "experts", mtp=0)
    network = transformers_model(architecture, random_weights(hf_names(parameter_maps(architecture)))).bfloat16()
    network.config.dtype = network.config.text_config.dtype = network.config.vision_config.dtype = torch.bfloat16
    network.config.text_config.eos_token_id, network.config.text_config.pad_token_id = 7, 5
    network.config.bos_token_id = 3
    network.save_pretrained(root / "hf")
    to_megatron(root / "hf", root / "megatron")
    return root


def config_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


def test_nothing_is_lost(saved: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    to_hf(saved / "megatron", tmp_path / "back", like=saved / "hf")
    config = config_of(tmp_path / "back")
    assert config == config_of(saved / "hf")
    assert (config["text_config"]["eos_token_id"], config["text_config"]["pad_token_id"]) == (7, 5)
    assert (config["bos_token_id"], config["dtype"]) == (3, "bfloat16")
    assert {"architectures", "transformers_version"} <= config.keys()
    before, after = (
        AutoModelForImageTextToText.from_pretrained(each, dtype="auto") for each in (saved / "hf", tmp_path / "back")
    )
    assert after.dtype == torch.bfloat16
    assert after.config.to_dict() == before.config.to_dict() | {"_name_or_path": str(tmp_path / "back")}
    for name, weight in before.state_dict().items():
        assert torch.equal(after.state_dict()[name], weight), name


def test_the_dtype_is_the_one_that_is_written(saved: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    to_hf(saved / "megatron", tmp_path / "back", like=saved / "hf", dtype=torch.float32)
    wanted = config_of(saved / "hf")
    wanted["dtype"] = wanted["text_config"]["dtype"] = wanted["vision_config"]["dtype"] = "float32"
    assert config_of(tmp_path / "back") == wanted
    assert AutoModelForImageTextToText.from_pretrained(tmp_path / "back", dtype="auto").dtype == torch.float32


def test_transformers_needs_no_model_to_be_like(saved: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    to_hf(saved / "megatron", tmp_path / "back")
    after = AutoModelForImageTextToText.from_pretrained(tmp_path / "back", dtype="auto")
    before = AutoModelForImageTextToText.from_pretrained(saved / "hf", dtype="auto")
    assert type(after) is type(before)
    assert after.dtype == torch.bfloat16
    for name, weight in before.state_dict().items():
        assert torch.equal(after.state_dict()[name], weight), name


def test_an_older_spelling_and_absent_fields_stay(saved: Path, tmp_path: Path) -> None:
    like = tmp_path / "like"
    like.mkdir()
    config = config_of(saved / "hf")
    for section in (config, config["text_config"], config["vision_config"]):
        del section["dtype"]
    config["torch_dtype"] = "float16"
    (like / "config.json").write_text(json.dumps(config))
    to_hf(saved / "megatron", tmp_path / "back", like=like)
    assert config_of(tmp_path / "back") == config | {"torch_dtype": "bfloat16"}


def test_another_model_to_be_like_is_refused(saved: Path, tmp_path: Path) -> None:
    config = config_of(saved / "hf")
    config["text_config"]["rope_parameters"]["rope_theta"] = 1e4
    config["vision_config"]["depth"] = 7
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError) as refused:
        to_hf(saved / "megatron", tmp_path / "back", like=tmp_path)
    assert "text_config.rope_parameters.rope_theta: 10000.0, but the weights have 10000000.0" in str(refused.value)
    assert "vision_config.depth: 7, but the weights have 2" in str(refused.value)
    assert not (tmp_path / "back").exists()


class TestUnknownFields:
    @pytest.fixture
    def source(self, saved: Path, tmp_path: Path) -> Path:
        """The checkpoint with two fields more."""
        config = config_of(saved / "hf")
        config["text_config"]["layer_scale"] = 1.0
        config["text_config"]["colour"] = "red"
        source = tmp_path / "source"
        source.mkdir()
        for file in (saved / "hf").iterdir():
            (source / file.name).symlink_to(file)
        (source / "config.json").unlink()
        (source / "config.json").write_text(json.dumps(config))
        return source

    def test_the_remedies_are_named(self, source: Path, tmp_path: Path) -> None:
        with pytest.raises(WeightsError) as refused:
            to_megatron(source, tmp_path / "megatron")
        message = str(refused.value)
        assert "unknown fields in text_config: colour, layer_scale" in message
        assert "--ignore-config-field colour --ignore-config-field layer_scale" in message
        assert """--set 'model.ignore_config_fields=["colour", "layer_scale"]'""" in message

    def test_they_can_be_ignored_there_and_back(self, source: Path, tmp_path: Path) -> None:
        ignore = ["colour", "layer_scale"]
        to_megatron(source, tmp_path / "megatron", ignore=ignore)
        to_hf(tmp_path / "megatron", tmp_path / "back", like=source, ignore=ignore)
        assert config_of(tmp_path / "back") == config_of(source)
        to_hf(tmp_path / "megatron", tmp_path / "plain")  # what was converted needs no more ignoring

    def test_the_command_ignores_them(self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from vlmdata.cli.main import app
        from vlmdata.model.parallel import groups

        monkeypatch.setattr(groups, "initialize", lambda **options: None)  # those of this process exist
        monkeypatch.setattr(groups, "destroy", lambda: None)
        given = ["convert", str(source), "--out", str(tmp_path / "megatron"), "--ignore-config-field", "colour"]
        refused = CliRunner().invoke(app, given)
        assert isinstance(refused.exception, WeightsError)
        assert "unknown fields in text_config: layer_scale;" in str(refused.exception)
        done = CliRunner().invoke(app, [*given, "--ignore-config-field", "layer_scale"])
        assert done.exit_code == 0, done.output
        assert (tmp_path / "megatron" / ".metadata").exists()


def test_the_trainer_ignores_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from vlmdata.families import family
    from vlmdata.model.training import build

    architecture = small_architecture()
    config = architecture_to_hf(architecture)
    config["vision_config"]["colour"] = "red"
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = SimpleNamespace(name="t", vocab_size=200, image=architecture.image_token_id)
    data = SimpleNamespace(tokenizer=tokenizer, model_family=family("qwen3_5"), config={}, features=())
    monkeypatch.setattr(build, "manifest_of", lambda config: data)
    given = ["data.paths=d", f"model.hf={tmp_path}"]
    with pytest.raises(ConfigError, match=r"vision_config: colour; .*model.ignore_config_fields"):
        architecture_of(load_config(None, given))
    assert architecture_of(load_config(None, [*given, "model.ignore_config_fields=colour"])) == architecture
