"""A model trains on data of its own family only."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from vlmdata.format.manifest import Manifest
from vlmdata.model.families import preset
from vlmdata.model.training.settings.config import ConfigError
from vlmdata.model.training.settings.config_loading import load_config
from vlmdata.model.training.settings.early_checks import check_early, require_data_family


def test_data_of_another_family_is_refused(chats: Path) -> None:
    manifest = dataclasses.replace(Manifest.read(chats), family="qwen3_vl")
    require_data_family(preset("tiny"), Manifest.read(chats), str(chats))
    with pytest.raises(ConfigError, match="for the model family qwen3_vl, but the model needs qwen3_5: pre"):
        require_data_family(preset("tiny"), manifest, str(chats))


def test_a_model_of_another_family_is_refused(chats: Path) -> None:
    config = load_config(None, [("data.paths", [str(chats)]), ("model.preset", "qwen3-vl-tiny")])
    with pytest.raises(ConfigError, match="for the model family qwen3_5, but the model needs qwen3_vl: preprocess it "):
        check_early(config)


@pytest.mark.parametrize("name", ["image_mean", "image_std"])
def test_data_made_with_other_constants_is_refused(chats: Path, name: str) -> None:
    config = load_config(None, [("data.paths", [str(chats)])])
    manifest = with_processor(Manifest.read(chats), {name: [0.48, 0.46, 0.41]})
    message = f"{chats}: its images were made with {name} [0.48, 0.46, 0.41], but the model needs [0.5, 0.5, 0.5]"
    with pytest.raises(ConfigError, match=re.escape(message)):
        require_data_family(preset(config.model.preset), manifest, str(chats))


def test_every_dataset_of_a_join_is_checked(chats: Path) -> None:
    first = Manifest.read(chats)
    other = with_processor(first, {"merge_size": 4}).config
    joined = dataclasses.replace(first, config={"joined": [first.config, other]})
    with pytest.raises(ConfigError, match="merge_size 4, but the model needs 2"):
        require_data_family(preset("tiny"), joined, str(chats))


def test_a_tower_with_other_patches_is_refused(chats: Path) -> None:
    made = preset("tiny")
    architecture = dataclasses.replace(made, vision=dataclasses.replace(made.vision, patch_size=14))
    with pytest.raises(ConfigError, match="patch_size 16, but the model needs 14"):
        require_data_family(architecture, Manifest.read(chats), str(chats))


def test_the_loader_checks_every_dataset(chats: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    from vlmdata.model.training.data import RankPlace, open_loader

    second = tmp_path / "second"
    shutil.copytree(chats, second)
    text = json.loads((second / "manifest.json").read_text())
    text["config"]["fingerprints"]["processor"]["image_std"] = [0.25, 0.25, 0.25]
    (second / "manifest.json").write_text(json.dumps(text))
    config = load_config(None, [("data.paths", [str(chats), str(second)]), "data.workers=0"])
    place = RankPlace(0, 1, 0, 1, 0, 1, 0, first_stage=True, last_stage=True)
    with pytest.raises(ConfigError, match=r"second: its images were made with image_std"):
        open_loader(config, place, preset("tiny"), torch.device("cpu"))


def with_processor(manifest: Manifest, changes: dict[str, Any]) -> Manifest:
    config = copy.deepcopy(dict(manifest.config))
    config["fingerprints"]["processor"] |= changes
    return dataclasses.replace(manifest, config=config)


def test_it_is_refused_before_torch_and_again_when_the_model_is_chosen(
    chats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("megatron.core")
    from vlmdata.model.training import build

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
