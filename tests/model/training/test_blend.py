"""Several datasets in a run, by weight."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from tests.chat_rows import write_jsonl
from tests.loader.rows import chat_rows
from tests.model.small_vocabulary import build_chats
from tests.model.training.conftest import SETTINGS, steps_of, without_collecting_at_the_start
from vlmdata.errors import ConfigMismatchError, DatasetFormatError
from vlmdata.model.families.qwen3_5.architecture import Qwen35Architecture
from vlmdata.model.families.qwen3_5.presets import PRESETS
from vlmdata.model.families.qwen3_5.spec import step_flops
from vlmdata.model.parallel import groups
from vlmdata.model.training.data import RankPlace, open_loader
from vlmdata.model.training.loop import train
from vlmdata.model.training.settings.config import ConfigError
from vlmdata.model.training.settings.config_loading import load_config
from vlmdata.model.training.settings.early_checks import check_early
from vlmdata.model.weights.convert import read_architecture
from vlmdata.model.weights.hf_processor import choose_dataset
from vlmdata.preprocess.config import ImageConfig

ALONE, TINY = RankPlace(0, 1, 0, 1, 0, 1, 0, True, True), PRESETS["tiny"]


@pytest.fixture(scope="module")
def two(chats: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The chats, and a few others."""
    folder = tmp_path_factory.mktemp("few")
    rows = [row for row in chat_rows(200)[160:] if all(len(str(each).split()) < 120 for each in row["messages"])]
    few = build_chats(write_jsonl(folder / "few.jsonl", rows), folder / "few", image=ImageConfig(1024, 16384))
    return [str(chats), str(few)]


def config_of(two: list[str], out: Path, **settings: Any) -> Any:
    changed = {name.replace("__", "."): value for name, value in settings.items()}
    return load_config(None, list((SETTINGS | {"data.paths": two, "run.out": str(out)} | changed).items()))


@pytest.mark.parametrize(
    ("settings", "times"),
    [
        ({}, {0: {1}, 1: {1}}),
        ({"data__blend": [0, 3], "data__blend_by": "epochs"}, {1: {3}}),
        ({"data__blend": [2, 1], "data__blend_by": "epochs"}, {0: {2}, 1: {1}}),
    ],
)
def test_an_epoch_holds_what_the_weights_say(
    two: list[str], tmp_path: Path, settings: dict[str, Any], times: dict[int, set[int]]
) -> None:
    with open_loader(config_of(two, tmp_path, **settings), ALONE, TINY, torch.device("cpu")) as loader:
        uses = Counter((origin.dataset, origin.index) for batch in loader for origin in batch.origins)
    for number in (0, 1):
        assert {count for (dataset, _), count in uses.items() if dataset == number} == times.get(number, set())


@pytest.mark.parametrize(("by", "value"), [("tokens", "tokens"), ("samples", "samples")])
def test_weights_are_shares(two: list[str], tmp_path: Path, by: str, value: str) -> None:
    config = config_of(two, tmp_path, data__blend=[0.25, 0.75], data__blend_by=by)
    mass: Counter[int] = Counter()
    with open_loader(config, ALONE, TINY, torch.device("cpu")) as loader:
        for batch in loader:
            for origin, length in zip(batch.origins, batch.cu_seqlens.diff().tolist(), strict=False):
                mass[origin.dataset] += length if value == "tokens" else 1
    assert mass[1] / mass.total() == pytest.approx(0.75, abs=0.01)


@pytest.mark.parametrize("architecture", [TINY, PRESETS["2b"], PRESETS["35b-a3b"]])
def test_packs_are_balanced_by_the_cost_of_the_model_that_is_trained(
    two: list[str], tmp_path: Path, architecture: Qwen35Architecture
) -> None:
    cpu = torch.device("cpu")
    with open_loader(config_of(two, tmp_path), ALONE, architecture, cpu) as loader:
        assert loader.plan_config.cost == step_flops(architecture).cost_model()
        trained_tower = loader.plan_config.cost
    frozen = config_of(two, tmp_path, model__freeze=["vision"], model__mtp=False)
    with open_loader(frozen, ALONE, architecture, cpu) as loader:
        assert loader.plan_config.cost.per_patch < trained_tower.per_patch / 2
        assert loader.plan_config.cost.per_target == trained_tower.per_target / 2


def trained(config: Any, resume: bool) -> None:
    groups.seed_all(config.run.seed)
    with without_collecting_at_the_start():
        train(config, torch.device("cpu"), resume)


def test_a_run_goes_on_with_its_weights_only(one_process: None, two: list[str], tmp_path: Path) -> None:
    blend = {"data__blend": [0.25, 0.75], "run__steps": 4}
    trained(config_of(two, tmp_path / "whole", **blend), resume=False)
    out = tmp_path / "run"
    trained(config_of(two, out, **{**blend, "run__steps": 2}), resume=False)
    saved = out / "checkpoints" / "step-00000002" / "config.toml"
    with pytest.raises(ConfigMismatchError, match=r"blend.weights: .*0.25, 0.75.* -> .*0.5, 0.5"):
        trained(load_config(saved, ["data.blend=[0.5, 0.5]", "run.steps=4"]), resume=True)
    changed = tmp_path / "changed"
    shutil.copytree(out, changed)
    other = ["data.blend=[1, 0]", "data.change=true", "run.steps=3", f"run.out={changed}"]
    trained(load_config(saved, other), resume=True)
    state = json.loads((changed / "checkpoints" / "step-00000003" / "run.json").read_text())["loader"]
    assert (state["epoch"], state["step"]) == (1, 1)
    assert [(stage["epoch"], stage["step"]) for stage in state["plan"]["earlier"]] == [(0, 2)]
    trained(load_config(saved, ["run.steps=4"]), resume=True)
    assert [(line["loss"], line["tokens"]) for line in steps_of(out)] == [
        (line["loss"], line["tokens"]) for line in steps_of(tmp_path / "whole")
    ]


def test_a_run_of_a_mixture_file_is_that_of_its_weights(
    one_process: None, two: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process, which checks the datasets early, and when several began it; conversion knows its datasets."""
    weighted = {"data__blend": [3, 1], "data__blend_by": "epochs", "run__steps": 2}
    trained(config_of(two, tmp_path / "weighted", **weighted), resume=False)
    file = tmp_path / "mixture.toml"
    parts = zip("ab", two, (3, 1), strict=True)
    file.write_text('by = "epochs"\n' + "".join(f'[datasets.{n}]\npath = "{p}"\nweight = {w}\n' for n, p, w in parts))
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_early(config_of([str(file)], tmp_path / "run"))
    trained(config_of([str(file)], tmp_path / "run", run__steps=1), resume=False)
    monkeypatch.delenv("WORLD_SIZE")
    saved = load_config(tmp_path / "run" / "checkpoints" / "step-00000001" / "config.toml", ["run.steps=2"])
    check_early(saved)
    trained(saved, resume=True)
    lines = [[(line["loss"], line["samples"]) for line in steps_of(tmp_path / run)] for run in ("run", "weighted")]
    assert lines[0] == lines[1]
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000002"
    assert choose_dataset(checkpoint, None, None, read_architecture(checkpoint)) == (two[0], [])
    with pytest.raises(ConfigError, match=rf"data\.eval_paths {file}: .* give the datasets of this mixture file"):
        check_early(config_of(two, tmp_path / "run", data__eval_paths=[str(file)]))
    (tmp_path / "gone.toml").write_text(file.read_text().replace(two[1], "gone"))
    with pytest.raises(DatasetFormatError, match="gone: no such directory"):
        check_early(config_of([str(tmp_path / "gone.toml")], tmp_path / "run"))
