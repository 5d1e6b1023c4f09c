"""Ranks of two sides of which one fails, is asked to stop or has other data, and settings that fit no two sides."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from tests.model.training.conftest import SETTINGS, steps_of
from tests.model.training.many_runs import Run, train_all
from tests.model.training.ranks import Ranks, arguments_of, until_logged
from tests.model.workers import run_in_all
from vlmdata import StreamingLoader, VlmDataset
from vlmdata.model.training.settings.config import ConfigError


def with_sides(data: Path, out: Path, world: int, sizes: dict[str, int]) -> Ranks:
    """Starts a run that does not end by itself."""
    sets = [part for name, size in sizes.items() for part in ("--set", f"parallel.{name}={size}")]
    return Ranks(arguments_of(data, out, *sets, steps=1000), out.with_name("said"), world)


@pytest.mark.slow
@pytest.mark.parametrize(("killed", "sizes"), [(1, {"vision_gpus": 2}), (2, {"vision_gpus": 1, "pp": 2})])
def test_all_end_when_a_rank_is_killed(chats: Path, tmp_path: Path, killed: int, sizes: dict[str, int]) -> None:
    """One of the tower; one of the language model that exchanges nothing with the tower, its last stage."""
    ranks = with_sides(chats, tmp_path / "run", 3, sizes)
    until_logged(tmp_path / "run")
    process = ranks.processes[killed].pid
    assert process is not None
    os.kill(process, signal.SIGKILL)
    codes = ranks.wait()
    said = [ranks.said(rank) for rank in range(3)]
    assert codes == [-signal.SIGKILL if rank == killed else 1 for rank in range(3)], said
    assert any("another rank has exited or hangs" in text for text in said), said


@pytest.mark.slow
def test_all_end_when_a_rank_of_the_tower_is_asked_to_stop(chats: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ranks = with_sides(chats, out, 3, {"vision_gpus": 2})
    until_logged(out)
    process = ranks.processes[1].pid
    assert process is not None
    os.kill(process, signal.SIGTERM)
    codes = ranks.wait()
    assert codes == [128 + signal.SIGTERM] * 3, [ranks.said(rank) for rank in range(3)]
    assert "interrupted: step" in ranks.said(0)
    assert len(list((out / "checkpoints").glob("step-*"))) == 1


@pytest.mark.slow
def test_all_end_when_a_rank_of_the_tower_fails_in_a_step(chats: Path, tmp_path: Path) -> None:
    """Patches that it cannot read, in the second step's second micro-batch: it has sent rows, and is waited for."""
    data, out = tmp_path / "data", tmp_path / "run"
    shutil.copytree(chats, data)
    dataset = VlmDataset(data)
    sample = sample_with_images(chats, step=1, micro_batch=1)
    shard = dataset.shard_path(int(dataset.index.shard[sample]))
    with open(shard, "r+b") as file:
        file.seek(int(dataset.index.data_offsets["patches"][sample]))
        value = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([value ^ 1]))
    ranks = with_sides(data, out, 2, {"vision_gpus": 1})
    codes = ranks.wait()
    said = [ranks.said(rank) for rank in range(2)]
    assert codes == [2, 1], said
    assert "error: rank 1: another rank has exited or hangs" in said[1]
    row = int(dataset.index.source_row[sample])
    assert f"error: rank 0: {shard}: row {row} key {dataset.index.key(sample)} patches" in said[0]
    assert "Traceback" not in "".join(said)
    assert [line["step"] for line in steps_of(out)] == [1]


def sample_with_images(data: Path, step: int, micro_batch: int) -> int:
    """A sample of this micro-batch, both from 0."""
    names = ("capacity", "global_batch", "max_patches", "pad_multiple")
    with StreamingLoader(data, **{name: SETTINGS[f"data.{name}"] for name in names}) as loader:
        packs = [batch for batch in loader if batch.step == step]
        numbers = [origin.index for origin in packs[micro_batch].origins]
    images = VlmDataset(data)
    return next(number for number in numbers if len(images[number].image_grid_thw))


def other_data(datasets: list[Path], folder: Path, evaluation: bool) -> str:
    """What this rank says if rank 0 has one dataset, to train or to evaluate on, and the others another."""
    import torch.distributed as dist

    own = datasets[min(dist.get_rank(), 1)]
    settings = {"parallel.vision_gpus": 1} | ({"data.eval_paths": [str(own)]} if evaluation else {})
    return train_all(folder, datasets[0] if evaluation else own, [Run("run", 2, settings)])["run"]


@pytest.mark.slow
@pytest.mark.parametrize("evaluation", [False, True])
def test_ranks_that_would_wait_for_rows_that_are_not_sent_are_refused(
    chats: Path, validation: Path, tmp_path: Path, evaluation: bool
) -> None:
    said = run_in_all(other_data, [chats, validation], tmp_path, evaluation, world=2)
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
    from vlmdata.model.training.settings.config_loading import load_config
    from vlmdata.model.training.settings.early_checks import check_early

    monkeypatch.setenv("WORLD_SIZE", str(world))
    with pytest.raises(ConfigError, match=words):
        check_early(load_config(None, ["data.paths=nowhere", *settings]))
