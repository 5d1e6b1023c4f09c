"""`--hf` trains the weights of the checkpoint it names, or says that there are none."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from tests.model.training.conftest import SETTINGS, evaluations_of, steps_of, train_here
from tests.model.training.plain import plain_loss, write_checkpoint
from tests.model.training.ranks import Ranks, arguments_of
from tests.model.workers import run_in_all
from vlmdata import StreamingLoader
from vlmdata.model.training.processes.agreement import by_leaders
from vlmdata.model.training.settings.config import ConfigError
from vlmdata.model.training.settings.config_loading import load_config


@pytest.fixture(scope="module")
def checkpoint(chats: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder, and transformers' model of it."""
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    return folder, write_checkpoint(folder, chats)


@pytest.fixture(scope="module")
def first_loss(chats: Path, checkpoint: tuple[Path, Any]) -> float:
    """Transformers' loss of the samples of the first step, one by one."""
    settings = {name: SETTINGS[f"data.{name}"] for name in ("capacity", "max_patches", "global_batch", "pad_multiple")}
    with StreamingLoader(chats, **settings) as loader:
        batches = [batch for batch, _ in zip(loader, range(SETTINGS["data.global_batch"]), strict=False)]
    samples = [origin.index for batch in batches for origin in batch.origins]
    return plain_loss(checkpoint[1], chats, samples)[0]


def test_the_first_loss_is_transformers_loss(
    run: Callable[..., Any],
    checkpoint: tuple[Path, Any],
    first_loss: float,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(model__hf=str(checkpoint[0]), run__steps=1)
    assert steps_of(tmp_path / "run")[0]["loss"] == pytest.approx(first_loss, rel=1e-5)
    assert f"weights: Hugging Face checkpoint {checkpoint[0]}, 0.0" in capsys.readouterr().out


def test_a_run_is_resumed_after_the_folder_is_gone(
    run: Callable[..., Any], checkpoint: tuple[Path, Any], tmp_path: Path
) -> None:
    """Its own checkpoint has the architecture. A new run still needs the folder, and so does one without run.json."""
    folder = Path(shutil.copytree(checkpoint[0], tmp_path / "hf"))
    run(model__hf=str(folder), run__steps=1)
    shutil.rmtree(folder)
    assert run(model__hf=str(folder), run__steps=2, resume=True).steps == 2
    (tmp_path / "run" / "checkpoints" / "step-00000002" / "run.json").unlink()
    for again in (
        lambda: run("new", model__hf=str(folder), run__steps=1),
        lambda: run(model__hf=str(folder), run__steps=3, resume=True),
    ):
        with pytest.raises(ConfigError, match=f"model.hf '{folder}' is not a local folder with a config.json"):
            again()


@pytest.mark.slow
def test_also_where_each_rank_reads_its_part(
    chats: Path, validation: Path, checkpoint: tuple[Path, Any], first_loss: float, tmp_path: Path
) -> None:
    """And what it is before the first step, over a whole evaluation set."""
    out = tmp_path / "run"
    given = ("--hf", str(checkpoint[0]), "--tp", "2", "--sp", "--eval-data", str(validation), "--eval-every", "9")
    ranks = Ranks(arguments_of(chats, out, *given, steps=1), tmp_path / "said", 2)
    assert ranks.wait() == [0, 0], ranks.said(0) + ranks.said(1)
    assert steps_of(out)[0]["loss"] == pytest.approx(first_loss, rel=1e-5)
    before, _ = evaluations_of(out)
    assert (before["loss"], before["targets"]) == pytest.approx(plain_loss(checkpoint[1], validation), rel=1e-5)


def test_weights_name_a_hugging_face_folder_too(
    run: Callable[..., Any], checkpoint: tuple[Path, Any], first_loss: float, tmp_path: Path
) -> None:
    run(model__weights=str(checkpoint[0]), run__steps=1)
    assert steps_of(tmp_path / "run")[0]["loss"] == pytest.approx(first_loss, rel=1e-5)


def test_a_hub_id_is_downloaded(
    run: Callable[..., Any],
    checkpoint: tuple[Path, Any],
    first_loss: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import huggingface_hub
    import transformers

    asked: list[tuple[str, bool]] = []

    def snapshot(name: str, *, allow_patterns: list[str], local_files_only: bool) -> str:
        asked.append((name, local_files_only))
        assert {"*.safetensors", "*.json"} <= set(allow_patterns)
        return str(checkpoint[0])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    config = transformers.AutoConfig.from_pretrained(checkpoint[0])
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda name, trust_remote_code: config)
    run(model__hf="someone/tiny", run__steps=1)
    assert asked == [("someone/tiny", False), ("someone/tiny", True)]
    assert steps_of(tmp_path / "run")[0]["loss"] == pytest.approx(first_loss, rel=1e-5)


def download_on_two_nodes() -> tuple[float, float, str]:
    """Of ranks 0, 1 on one node and 2, 3 on another: when a rank began and ended, and what it was told."""
    rank = torch.distributed.get_rank()
    os.environ["LOCAL_RANK"] = str(rank % 2)
    begun = time.time()

    def download() -> None:
        assert rank % 2 == 0, "one process of each node downloads"
        time.sleep(0.3 + rank / 4)
        if rank == 2:
            raise ConfigError("node 2 cannot")

    told = ""
    try:
        by_leaders(download)
    except ConfigError as error:
        told = str(error)
    return begun, time.time(), told


def test_nodes_wait_for_each_other_s_download_and_fail_together() -> None:
    found = run_in_all(download_on_two_nodes)
    assert all(ended >= found[2][0] + 0.8 for _, ended, _ in found)
    assert {told for _, _, told in found} == {"node 2 cannot"}


def test_a_hub_id_without_a_hub_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from vlmdata.model.training.checkpoints import weights

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"someone/tiny: its weights could not be downloaded: .*`hf download someone"):
        weights._downloaded("someone/tiny")


@pytest.mark.parametrize("file", [False, True])
def test_a_config_alone_is_refused_until_random_weights_are_meant(
    run: Callable[..., Any], chats: Path, tmp_path: Path, file: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tiny"
    write_checkpoint(folder, chats, weights=False)
    name = str(folder / "config.json" if file else folder)
    message = "is a config.json, which has no weights" if file else r"has no weights \(\*\.safetensors\)"
    with pytest.raises(ConfigError, match=f"{message}: --weights none trains from random weights, --weights FOLDER"):
        run(model__hf=name, run__steps=1)
    assert not (tmp_path / "run" / "checkpoints").exists()
    run(model__hf=name, model__weights="none", run__steps=1)
    assert "weights: random, from seed 1234\n" in capsys.readouterr().out


def test_none_is_a_word_of_this_setting() -> None:
    assert load_config(None, ["model.weights=none"]).model.weights == "none"
    assert load_config(None, [("model.weights", "none")]).model.weights == "none"
    assert load_config(None, [("model.weights", "a"), "model.weights="]).model.weights is None


def test_weights_of_another_model_are_reported(
    run: Callable[..., Any], chats: Path, checkpoint: tuple[Path, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"they are of another model \(.*num_experts: None -> 8.*\)\. Select"):
        run(model__preset="tiny-moe", model__weights=str(checkpoint[0]), run__steps=1)


def test_weights_of_a_model_that_computes_otherwise_are_pointed_out(
    run: Callable[..., Any], checkpoint: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their tensors fit the preset, which has another rotary frequency."""
    folder = Path(shutil.copytree(checkpoint[0], tmp_path / "rotated"))
    settings = json.loads((folder / "config.json").read_text())
    theta = settings["text_config"]["rope_parameters"]["rope_theta"]
    settings["text_config"]["rope_parameters"]["rope_theta"] = 5 * theta
    (folder / "config.json").write_text(json.dumps(settings))
    line = f"other settings (model.text_config.rope_parameters.rope_theta: {5 * theta} -> {theta}); this run uses"
    run("preset", model__weights=str(folder), run__steps=1)
    assert line in capsys.readouterr().out
    run("equal", model__weights=str(checkpoint[0]), run__steps=1)
    run("theirs", model__hf=str(folder), run__steps=1)
    assert "other settings" not in capsys.readouterr().out


def test_files_without_prediction_need_a_word(run: Callable[..., Any], chats: Path, tmp_path: Path) -> None:
    """As transformers saves them."""
    write_checkpoint(tmp_path / "tiny", chats, mtp=False)
    with pytest.raises(ConfigError, match=r"no multi-token prediction weights.*mtp=false.*mtp=true"):
        run(model__hf=str(tmp_path / "tiny"), run__steps=1)
    losses = []
    for predict in (False, True):
        run(f"run-{predict}", model__hf=str(tmp_path / "tiny"), model__mtp=predict, run__steps=1)
        (line,) = steps_of(tmp_path / f"run-{predict}")
        losses.append(line["loss"])
        assert ("mtp_loss" in line) == predict
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_resumed_run_does_not_look_for_them(
    chats: Path, checkpoint: tuple[Path, Any], one_process: None, tmp_path: Path
) -> None:
    folder = tmp_path / "tiny"
    shutil.copytree(checkpoint[0], folder)
    train_here(tmp_path / "run", chats, model__hf=str(folder), run__steps=1)
    (folder / "model.safetensors").unlink()
    train_here(tmp_path / "run", chats, resume=True, model__hf=str(folder), run__steps=2)
    assert json.loads((tmp_path / "run/checkpoints/step-00000002/run.json").read_text())["step"] == 2
