"""The registry of model families, and that a model trains on data of its own family only."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from model.families import REGISTRY, architecture_from_hf, model_spec, preset, preset_costs, presets, spec_of
from model.training.config import ConfigError
from model.training.config_loading import load_config
from model.training.early_checks import check_early, require_data_family
from vlmdata.families import REGISTRY as DATA_FAMILIES
from vlmdata.format.manifest import Manifest


@pytest.mark.parametrize("name", REGISTRY)
def test_a_family_is_whole(name: str) -> None:
    spec = model_spec(name)
    assert spec.name == name
    assert spec.data_family in DATA_FAMILIES
    for made in spec.presets.values():
        assert spec_of(made) is spec
        written = spec.to_hf(made)
        assert written["model_type"] in spec.model_types
        assert architecture_from_hf(written) == made
    assert set(spec.presets) <= set(presets())
    assert set(spec.presets) <= set(preset_costs())


def test_names_of_presets_are_unique() -> None:
    assert len(presets()) == sum(len(model_spec(name).presets) for name in REGISTRY)


def test_the_registry_needs_no_torch() -> None:
    program = "import sys\nsys.modules['torch'] = None\nimport model.families as f\nf.preset_costs(), f.preset('4b')"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_an_unknown_family_is_named() -> None:
    with pytest.raises(ValueError, match="no model family 'llama'; known families: qwen3_5"):
        model_spec("llama")


def test_data_of_another_family_is_refused(chats: Path) -> None:
    manifest = dataclasses.replace(Manifest.read(chats), family="qwen3_vl")
    require_data_family(preset("tiny"), Manifest.read(chats), str(chats))
    with pytest.raises(
        ConfigError, match="made for the model family qwen3_vl, but the model reads qwen3_5: preprocess"
    ):
        require_data_family(preset("tiny"), manifest, str(chats))


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
        with pytest.raises(ConfigError, match="made for the model family qwen2_5_vl"):
            refuse(config)
