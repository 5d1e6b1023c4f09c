"""Runs with the vision tower on processes of its own: as one process, across layouts, with faults."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from model.training.config import ConfigError
from model.training.failure import NotFiniteError
from tests.chat_rows import write_jsonl
from tests.conftest import build_dataset
from tests.model.training.conftest import SETTINGS, evaluations_of, short_rows, steps_of, train_here
from tests.model.training.plain import write_hf_folder
from tests.model.training.ranks import Ranks, arguments_of, until_logged
from tests.model.workers import meet_again, run_in_all

pytestmark = pytest.mark.slow

#: A run: its folder, its settings, and the run whose first step it continues, if any.
type Run = tuple[Path, dict[str, Any], Path | None]

STEPS = {"run.steps": 2, "run.save_every": 1, "run.keep": 0}


def train_all(data: Path, runs: list[Run]) -> list[str]:
    """Trains one run after another in the same processes; what this one said of a loss that is not finite."""
    import torch.distributed as dist

    from model.parallel import groups
    from model.training.config_loading import load_config
    from model.training.loop import train

    said = []
    for out, settings, source in runs:
        given = SETTINGS | {"data.paths": [str(data)], "run.out": str(out)} | settings
        if "model.hf" in settings:
            del given["model.preset"]
        config = load_config(None, list(given.items()))
        parallel = config.parallel
        if source is not None and dist.get_rank() == 0:
            after_first_step(source, out)
        dist.barrier()
        groups.initialize(
            backend="gloo",
            tensor=parallel.tp,
            context=parallel.cp,
            pipeline=parallel.pp,
            expert=parallel.ep,
            vision=parallel.vision_gpus,
            vision_tensor=parallel.vision_tp or 1,
        )
        try:
            train(config, torch.device("cpu"), source is not None)
            said.append("")
        except NotFiniteError as error:
            said.append(str(error))
        meet_again()
    return said


def alone(data: Path, out: Path, settings: dict[str, Any], resume: bool = False) -> Path:
    """The same run in this process."""
    train_here(out, data, resume, **{name.replace(".", "__"): value for name, value in settings.items()})
    return out


def after_first_step(source: Path, out: Path) -> Path:
    """Copies a run as it was after its first step."""
    shutil.copytree(source, out)
    for folder in (out / "checkpoints").glob("step-*"):
        if int(folder.name[-8:]) > 1:
            shutil.rmtree(folder)
    return out


def converted(out: Path, to: Path) -> dict[str, torch.Tensor]:
    """The weights of a run's last checkpoint in Hugging Face's form."""
    from safetensors.torch import load_file

    from model.weights.convert import to_hf

    to_hf(max((out / "checkpoints").glob("step-*")), to)
    return load_file(to / "model.safetensors")


def assert_same(found: Path, wanted: Path) -> None:
    """Asserts that the steps of two runs are the same up to rounding."""
    ours, theirs = steps_of(found), steps_of(wanted)
    assert [each["step"] for each in ours] == [each["step"] for each in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        waits = {"vision_wait", "language_wait"}
        assert mine.keys() - waits == other.keys() - waits
        assert all(mine[name] >= 0 for name in waits & mine.keys())
        for name in {"loss", "mtp_loss", "moe_aux_loss", "grad_norm"} & mine.keys():
            assert mine[name] == pytest.approx(other[name], rel=2e-4), (found.name, mine["step"], name)
        for name in ("targets", "tokens", "images", "patches", "lr", "epoch"):
            assert mine[name] == other[name], (found.name, mine["step"], name)
        assert mine["tflops"] * mine["seconds"] == pytest.approx(other["tflops"] * other["seconds"])


@pytest.fixture(scope="module")
def hf(chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that do not depend on the layout."""
    folder = tmp_path_factory.mktemp("weights") / "hf"
    write_hf_folder(folder, chats)
    return folder


def test_runs_equal_one_process_and_go_on_in_other_layouts(
    one_process: None, chats: Path, validation: Path, hf: Path, tmp_path: Path
) -> None:
    """Losses, gradient norms and evaluations of three steps, all but the first made by another layout."""
    whole = {**STEPS, "run.steps": 3, "model.hf": str(hf), "run.eval_every": 3, "data.eval_paths": [str(validation)]}
    reference = alone(chats, tmp_path / "reference", whole)
    stages = whole | {"parallel.vision_gpus": 1, "parallel.pp": 2}
    tensor = whole | {"parallel.vision_gpus": 1, "parallel.tp": 2, "parallel.sp": True}
    replicas = whole | {"parallel.vision_gpus": 2, "parallel.vision_tp": 2}
    runs: list[Run] = [
        (tmp_path / "stages", stages, None),
        (tmp_path / "tensor, from one process", tensor, reference),
        (tmp_path / "replicas, from stages", replicas, tmp_path / "stages"),
    ]
    assert run_in_all(train_all, chats, runs, world=3) == [["", "", ""]] * 3
    alone(chats, after_first_step(tmp_path / "stages", tmp_path / "one process, from stages"), whole, resume=True)
    for name in ("stages", "tensor, from one process", "replicas, from stages", "one process, from stages"):
        assert_same(tmp_path / name, reference)
        # Of an evaluation that both the run and the copied one made, the later line counts.
        found, wanted = (
            {each["step"]: each["loss"] for each in evaluations_of(out)} for out in (tmp_path / name, reference)
        )
        assert found.keys() == {0, 3}
        assert found == pytest.approx(wanted, rel=2e-4)
    exported = [converted(tmp_path / name, tmp_path / f"hf, {name}") for name in ("reference", "stages")]
    assert exported[0].keys() == exported[1].keys()
    for name, tensor in exported[0].items():
        torch.testing.assert_close(exported[1][name], tensor, rtol=2e-5, atol=1e-5, msg=name)


def test_experts_and_frozen_parts(one_process: None, chats: Path, hf: Path, tmp_path: Path) -> None:
    """Rank 0 trains no experts, or nothing at all, and its checkpoints have the optimizer's steps all the same."""
    write_hf_folder(tmp_path / "experts", chats, "tiny-moe")
    experts = {**STEPS, "model.hf": str(tmp_path / "experts")}
    frozen: dict[str, dict[str, Any]] = {
        name: {**STEPS, "model.freeze": parts, "model.hf": str(hf)}
        for name, parts in {"tower": ["vision", "merger"], "language": ["language"]}.items()
    }
    frozen["language"]["run.steps"] = 1
    spread = experts | {"parallel.vision_gpus": 1, "parallel.ep": 2}
    runs: list[Run] = [(tmp_path / "spread", spread, None)]
    runs += [(tmp_path / name, {**each, "parallel.vision_gpus": 2}, None) for name, each in frozen.items()]
    runs.append((tmp_path / "spread, resumed", spread, tmp_path / "spread"))
    runs.append((tmp_path / "tower, resumed", {**frozen["tower"], "parallel.vision_gpus": 2}, tmp_path / "tower"))
    assert run_in_all(train_all, chats, runs, world=3) == [[""] * 5] * 3
    references = {name: alone(chats, tmp_path / f"reference, {name}", each) for name, each in frozen.items()}
    references["spread"] = alone(chats, tmp_path / "reference", experts)
    for name, reference in references.items():
        assert_same(tmp_path / name, reference)
    for name in ("spread", "tower"):
        assert_same(tmp_path / f"{name}, resumed", references[name])


def test_data_without_images_and_steps_that_are_not_finite(
    one_process: None, chats: Path, hf: Path, tmp_path: Path
) -> None:
    texts = [row for row in short_rows(80) if not any(_images(message) for message in row["messages"])]
    source = write_jsonl(tmp_path / "texts.jsonl", texts)
    data = build_dataset(source, tmp_path / "texts", recipe="chat", rows_per_shard=12, pad_multiple=16)
    settings = {"model.hf": str(hf), "run.steps": 2}
    reference = alone(data, tmp_path / "reference", settings)
    apart = settings | {"parallel.vision_gpus": 1}
    wild = apart | {
        "optimizer.lr": 1e30,
        "optimizer.min_lr": 0.0,
        "optimizer.warmup_steps": 0,
        "data.paths": [str(chats)],
    }
    runs: list[Run] = [(tmp_path / "texts only", apart, None), (tmp_path / "wild", wild, None)]
    said = run_in_all(train_all, data, runs, world=2)
    assert_same(tmp_path / "texts only", reference)
    assert {"vision_wait", "language_wait"} <= steps_of(tmp_path / "texts only")[0].keys()
    assert said[0] == said[1], "all ranks end with the same error"
    assert said[0][1].startswith(("step 2 gave loss nan", "step 2 gave loss inf"))
    packs = json.loads((tmp_path / "wild" / "not-finite-step-00000002.json").read_text())["packs"]
    assert [(pack["data_parallel_rank"], pack["micro_batch"]) for pack in packs] == [(0, 0), (0, 1)]
    assert not all(pack["finite"] for pack in packs)


def _images(message: dict[str, Any]) -> bool:
    return any(item["type"] == "image" for item in message["content"])


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_all_end_when_a_rank_of_the_tower_dies_or_is_asked_to_stop(
    chats: Path, tmp_path: Path, sent: signal.Signals
) -> None:
    out = tmp_path / "run"
    options = ("--set", "parallel.vision_gpus=2", "--set", "run.steps=1000")
    ranks = Ranks(arguments_of(chats, out, *options), tmp_path / "said", world=3)
    until_logged(out)
    process = ranks.processes[1].pid
    assert process is not None
    os.kill(process, sent)
    codes = ranks.wait()
    said = [ranks.said(rank) for rank in range(3)]
    if sent == signal.SIGKILL:
        assert codes == [1, -signal.SIGKILL, 1], said
        assert any("another rank has exited or hangs" in text for text in said), said
    else:
        assert codes == [128 + signal.SIGTERM] * 3, said
        assert "interrupted: step" in said[0]
        assert len(list((out / "checkpoints").glob("step-*"))) == 1


def other_data(datasets: list[Path], out: Path, evaluation: bool) -> str:
    """What this rank says if rank 0 has one dataset, to train or to evaluate on, and the others another."""
    import torch.distributed as dist

    own = datasets[min(dist.get_rank(), 1)]
    settings = {"parallel.vision_gpus": 1} | ({"data.eval_paths": [str(own)]} if evaluation else {})
    try:
        train_all(datasets[0] if evaluation else own, [(out, settings, None)])
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("evaluation", [False, True])
def test_ranks_that_would_wait_for_rows_that_are_not_sent_are_refused(
    chats: Path, validation: Path, tmp_path: Path, evaluation: bool
) -> None:
    said = run_in_all(other_data, [chats, validation], tmp_path / "run", evaluation, world=2)
    assert said[0] == said[1]
    name = f"evaluation data ({chats.name})" if evaluation else "data"
    assert f"ranks [1] have other {name} than rank 0" in said[0]


@pytest.mark.parametrize(
    ("world", "settings", "words"),
    [
        (
            2,
            ["parallel.vision_gpus=1", "model.language_only=true"],
            "model.language_only has no vision tower for ranks",
        ),
        (
            4,
            ["parallel.vision_gpus=3", "parallel.vision_tp=3"],
            "parallel.vision_tp 3 does not divide vision.num_heads",
        ),
        (2, ["parallel.vision_gpus=2"], "parallel.vision_gpus 2 does not fit world size 2: .* sizes that do: 1$"),
        (
            4,
            ["parallel.vision_gpus=1", "data.global_batch=2"],
            "global_batch 2 is not a multiple of the 3 data-parallel",
        ),
        (1, ["parallel.vision_tp=2"], "parallel.vision_tp must be 1 or parallel.tp"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_anything_is_imported(
    monkeypatch: pytest.MonkeyPatch, world: int, settings: list[str], words: str
) -> None:
    from model.training.config_loading import load_config
    from model.training.early_checks import check_early

    monkeypatch.setenv("WORLD_SIZE", str(world))
    with pytest.raises(ConfigError, match=words):
        check_early(load_config(None, ["data.paths=nowhere", *settings]))
