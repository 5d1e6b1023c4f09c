"""A model trains on data of its own family only."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from model.families import preset
from model.training.settings.config import ConfigError
from model.training.settings.config_loading import load_config
from model.training.settings.early_checks import check_early, require_data_family
from vlmdata.format.manifest import Manifest


def test_data_of_another_family_is_refused(chats: Path) -> None:
    manifest = dataclasses.replace(Manifest.read(chats), family="qwen3_vl")
    require_data_family(preset("tiny"), Manifest.read(chats), str(chats))
    with pytest.raises(ConfigError, match="for the model family qwen3_vl, but the model needs qwen3_5: pre"):
        require_data_family(preset("tiny"), manifest, str(chats))


def test_a_model_of_another_family_is_refused(chats: Path) -> None:
    config = load_config(None, [("data.paths", [str(chats)]), ("model.preset", "qwen3-vl-tiny")])
    with pytest.raises(ConfigError, match="for the model family qwen3_5, but the model needs qwen3_vl: preprocess it "):
        check_early(config)


def test_it_is_refused_before_torch_and_again_when_the_model_is_chosen(
    chats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("megatron.core")
    from model.training import build

    other = dataclasses.replace(Manifest.read(chats), family="qwen2_5_vl")
    config = load_config(None, [("data.paths", [str(chats)])])
    check_early(config)
    assert build.architecture_of(config).family == "qwen3_5"
    monkeypatch.setattr(Manifest, "read", classmethod(lambda cls, path: other))
    monkeypatch.setattr(build, "manifest_of", lambda config: other)
    for refuse in (check_early, build.architecture_of):
        with pytest.raises(ConfigError, match="is for the model family qwen2_5_vl"):
            refuse(config)


def test_an_empty_folder_for_the_run_is_refused(chats: Path) -> None:
    config = load_config(None, [("data.paths", [str(chats)]), ("run.out", "")])
    with pytest.raises(ConfigError, match=r"run\.out is empty"):
        check_early(config)


def test_a_url_for_the_runs_folder_is_refused(chats: Path) -> None:
    config = load_config(None, [("data.paths", [str(chats)]), ("run.out", "s3://bucket/run")])
    with pytest.raises(ConfigError, match=r"run\.out is 's3://bucket/run': a run's folder must be on a file system"):
        check_early(config)
