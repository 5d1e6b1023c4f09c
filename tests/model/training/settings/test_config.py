"""Settings: where they come from, and what is refused with which words."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from vlmdata.loader.config import loader_options
from vlmdata.model.training.settings import name_hints
from vlmdata.model.training.settings.config import (
    WITHOUT_EFFECT_ON_RESULTS,
    ConfigError,
    DataConfig,
    TrainConfig,
    config_differences,
)
from vlmdata.model.training.settings.config_loading import load_config


def test_a_file_and_then_overrides_win(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[data]\npaths = ["a", "b"]\ncapacity = 4096\n[optimizer]\nlr = 1\n')
    config = load_config(file, ["data.capacity=512", ("run.steps", 7), 'model.freeze=["vision"]', "run.out=here/it/is"])
    assert config.data.paths == ("a", "b")
    assert (config.data.capacity, config.run.steps, config.run.out) == (512, 7, "here/it/is")
    assert config.optimizer.lr == 1.0
    assert isinstance(config.optimizer.lr, float)
    assert config.model.freeze == ("vision",)
    assert config.data.workers == TrainConfig().data.workers


def test_what_is_saved_reads_back_to_the_same(tmp_path: Path) -> None:
    config = load_config(None, ['data.paths=["x y"]', "run.profile=[2, 3]", "data.max_patches=9", "optimizer.lr=3e-5"])
    file = tmp_path / "saved.toml"
    file.write_text(config.to_toml())
    assert load_config(file) == config
    assert load_config(file).hash() == config.hash()
    assert f"# configuration {config.hash()}" in file.read_text()


def test_whole_floats_are_ints_and_ints_floats() -> None:
    config = load_config(None, ["run.steps=1e3", "optimizer.lr=1", "optimizer.min_lr=0"])
    assert (config.run.steps, config.optimizer.lr) == (1000, 1.0)
    assert isinstance(config.run.steps, int)
    assert isinstance(config.optimizer.lr, float)


def test_none_takes_a_setting_back(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[data]\nmax_patches = 100\n")
    assert load_config(file, ["data.max_patches=none"]).data.max_patches is None


def test_none_is_a_choice_where_it_is_one() -> None:
    assert load_config(None, ["model.recompute=full", "model.recompute=none"]).model.recompute == "none"


def test_options_of_the_loader_have_its_defaults_but_for_the_trainers_own() -> None:
    options = loader_options()
    shared = [each for each in dataclasses.fields(DataConfig) if each.name in options]
    different = {each.name for each in shared if each.default != options[each.name].default}
    assert different == {"capacity", "global_batch", "pad_to_capacity", "blend"}  # blend: empty instead of None
    assert len(shared) > 10


def test_the_hash_tells_what_changes_results() -> None:
    plain = TrainConfig()
    hashes = {"": plain.hash()}
    for group in dataclasses.fields(plain):
        for each in dataclasses.fields(getattr(plain, group.name)):
            part = dataclasses.replace(getattr(plain, group.name), **{each.name: "another value"})
            hashes[f"{group.name}.{each.name}"] = dataclasses.replace(plain, **{group.name: part}).hash()
    same = {name for name, found in hashes.items() if found == hashes[""]} - {""}
    assert same == WITHOUT_EFFECT_ON_RESULTS
    assert len(set(hashes.values())) == len(hashes) - len(same)
    assert {"run.out", "run.wandb", "data.workers"} <= same
    assert not {"run.steps", "run.seed", "data.paths", "model.hf", "parallel.tp"} & same


def test_every_word_of_other_trainers_means_a_setting() -> None:
    known = {f"{group}.{name}" for group, settings in TrainConfig().to_dict().items() for name in settings}
    assert name_hints._WORDS.keys() | name_hints._NOTES.keys() <= known
    assert len(name_hints._MEANT) == sum(len(words.split()) for words in name_hints._WORDS.values())


def test_a_model_is_named_once(tmp_path: Path) -> None:
    both = [("model.preset", "tiny"), ("model.hf", "a")]
    with pytest.raises(ConfigError, match=r"both model.preset .tiny. and model.hf .a. select the model to build"):
        load_config(None, both)
    file = tmp_path / "config.toml"
    file.write_text(load_config(None, both[1:]).to_toml())  # as saved beside a checkpoint: with the preset's default
    assert load_config(file).model.hf == "a"
    assert load_config(file, [("model.hf", "b")]).model.hf == "b"
    with pytest.raises(ConfigError, match=r"model.hf .a, from .*config.toml: --set model.hf=none removes it"):
        load_config(file, both[:1])
    assert load_config(file, [*both[:1], "model.hf=none"]).model.hf is None


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("lora.alpha=0", "lora.alpha is 0; it must be above 0. Unset, it is 16"),
        ("lora.dropout=1", "lora.dropout is 1; it must be below 1"),
        ('model.freeze=["vision"]', r"model.freeze .'vision'. does not go together with lora.rank 8"),
        ("model.language_only=true", "lora.vision=lora needs the vision tower"),
    ],
)
def test_settings_of_lora_that_do_not_go_together(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, ["lora.rank=8", "lora.vision=lora", setting])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.capasity=3", "unknown setting 'data.capasity'; the nearest is 'data.capacity'"),
        ("lr=3", "unknown setting 'lr'; it is 'optimizer.lr'"),
        ("seed=3", "it is 'data.seed' or 'run.seed'"),
        ("model.steps=3", "it is 'run.steps'"),
        ("optimizer.learning_rate=3", "it is 'optimizer.lr'"),
        ("training.max-steps=3", "it is 'run.steps' .total optimizer steps"),
        ("micro_batch_size=3", "it is 'data.global_batch' .*a micro-batch is one pack of up to data.capacity tokens"),
        ("seq_length=3", "it is 'data.capacity'"),
        ("tensor_model_parallel_size=3", "it is 'parallel.tp'"),
        ("lerning_rate=3", "the nearest is 'optimizer.lr'"),
        ("optimizer.wieght_decay=3", "the nearest is 'optimizer.weight_decay'"),
        ("qqq=3", "the nearest is '"),
        ("data.capacity=3.5", "data.capacity is 3.5 .float.; it must be int"),
        ("data.capacity=inf", "data.capacity is inf .float.; it must be int"),
        ("data.capacity=true", "data.capacity is True .bool.; it must be int"),
        ("data.capacity=0", "data.capacity is 0; it must be at least 1"),
        ("optimizer.lr=nan", "optimizer.lr is nan; it must be a finite number"),
        ("run.timeout_minutes=inf", "run.timeout_minutes is inf; it must be a finite number"),
        ("run.timeout_minutes=0", "run.timeout_minutes is 0.0; it must be more than 0 minutes"),
        ("optimizer.beta1=-0.1", "optimizer.beta1 is -0.1; it must be at least 0"),
        ("optimizer.beta2=1", "optimizer.beta2 is 1.0; it must be below 1"),
        ("optimizer.eps=-1", "optimizer.eps is -1.0; it must be at least 0"),
        ("optimizer.decay_steps=0", "optimizer.decay_steps is 0; it must be at least 1"),
        ("model.mtp_loss_scale=-1", "model.mtp_loss_scale is -1.0; it must be at least 0"),
        ("model.freeze=vision,merger", "choose from vision, merger, language: --freeze vision,merger, or --set "),
        ("run.tensorboard=1", "run.tensorboard is 1 .int.; it must be bool"),
        ("data.blend=[1, -1]", r"data.blend has 2 weights for 0 datasets; give one for each --data"),
        ("data.blend=1.5", "data.blend is 1.5; it must be a list"),
        ("run.fp8_recipe=mxfp8", "run.fp8_recipe is 'mxfp8'; it must be one of tensorwise, delayed, blockwise"),
        ("model.backend=te", "model.backend is 'te'; it must be one of auto, torch, transformer_engine"),
        ('model.freeze=["head"]', r"model.freeze names \['head'\]; choose from vision, merger, language"),
        ("lora.rank=0", "lora.rank is 0; it must be at least 1"),
        ("lora.alpha=32", "lora.alpha has no effect without adapters: give --lora-rank, such as 16"),
        ("lora.lora_r=8", "it is 'lora.rank'"),
        ("lora.target_modules=q_proj", "it is 'lora.targets'"),
        ("optimizer.min_lr=1", "optimizer.min_lr 1.0 is above optimizer.lr"),
        ("run.profile=[3, 2]", r"run.profile is \[3, 2\]; give the first and last step"),
        ("run.profile=[0, 2]", r"run.profile is \[0, 2\]; .*counted from 1"),
        ("run.profile=[101, 102]", r"run.profile \[101, 102\] starts after the last step, run.steps 100"),
        ("data.capacity", "write it as group.name=value"),
    ],
)
def test_what_is_wrong_is_refused_with_a_remedy(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, [setting])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps = 3\n", "'steps' is outside a table; settings belong in one of .data., .model."),
        ("[run\n", "not TOML"),
        ("[run]\nsteps = 'many'\n", "run.steps is 'many' .str.; it must be int"),
    ],
)
def test_a_file_that_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"run\.toml.*{message}"):
        load_config(file)


@pytest.mark.parametrize(
    ("blend", "message"),
    [
        ("[1]", "data.blend has 1 weight for 2 datasets: a, b; give one for each --data, in their order"),
        ("[1, -1]", r"data.blend is \[1.0, -1.0\]; weights must be finite, at least 0, and not all 0"),
        ("[0, 0]", "not all 0"),
        ("[1, inf]", "must be finite"),
        ("[1, nan]", "must be finite"),
    ],
)
def test_weights_of_datasets(blend: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, [("data.paths", ["a", "b"]), f"data.blend={blend}"])


def test_a_file_that_is_absent_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "nowhere.toml")


def test_a_checkpoint_that_is_no_longer_kept_is_answered_with_the_newest(tmp_path: Path) -> None:
    for step in ("step-00000008", "step-00000010"):
        (tmp_path / step).mkdir()
        (tmp_path / step / "config.toml").write_text("")
    with pytest.raises(ConfigError, match=r"No such file .* newest checkpoint there has .*/step-00000010/config\.toml"):
        load_config(tmp_path / "step-00000004" / "config.toml")


def test_differences_are_lines() -> None:
    old, new = TrainConfig().to_dict(), load_config(None, ["data.capacity=1", "parallel.tp=2"]).to_dict()
    assert config_differences(old, new) == ["data.capacity: 8192 -> 1", "parallel.tp: 1 -> 2"]
    before: dict[str, Any] = {"data": {"gone": 1}}
    assert config_differences(before, {"data": {}}) == ["data.gone: 1 -> None"]
    layers = {"model": {"text": {"kinds": ["a"] * 9}}}
    longer, other = ({"model": {"text": {"kinds": kinds}}} for kinds in (["a"] * 10, ["a"] * 4 + ["b"] + ["a"] * 4))
    assert config_differences(layers, longer) == ["model.text.kinds: [a, …, a] (9) -> [a, …, a] (10)"]
    assert "'b'" in config_differences(layers, other)[0]
