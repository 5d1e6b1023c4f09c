"""A small dataset to train on, and runs of the trainer in this process or as a command."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.chat_rows import write_jsonl
from tests.loader.rows import chat_rows
from tests.model.small_vocabulary import build_chats
from vlmdata.preprocess.config import ImageConfig

ROOT = Path(__file__).resolve().parents[3]

#: The same packs in every layout, small enough for a step in a second.
SETTINGS: dict[str, Any] = {
    "data.capacity": 448,
    "data.max_patches": 160,
    "data.global_batch": 2,
    "data.pad_multiple": 16,
    "data.workers": 0,
    "model.preset": "tiny",
    "optimizer.warmup_steps": 2,
    "optimizer.lr": 2e-3,
    "optimizer.decay_steps": 12,
    "run.steps": 6,
    "run.tensorboard": False,
}


def short_rows(count: int) -> list[dict[str, Any]]:
    """Those of so many chats that fit a pack."""
    return short(chat_rows(count))


def short(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those chats that fit a pack."""
    return [row for row in rows if sum(len(each["content"][-1]["text"].split()) for each in row["messages"]) < 200]


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats with no, one or two images."""
    folder = tmp_path_factory.mktemp("training")
    source = write_jsonl(folder / "chat.jsonl", short_rows(160))
    return build_chats(source, folder / "chat", image=ImageConfig(1024, 16384), rows_per_shard=12, pad_multiple=16)


@pytest.fixture(scope="session")
def validation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven chats with no, one or two images, of other packs than any number of ranks divides."""
    folder = tmp_path_factory.mktemp("validation")
    source = write_jsonl(folder / "chat.jsonl", short_rows(210)[-7:])
    return build_chats(source, folder / "validation", image=ImageConfig(1024, 16384), rows_per_shard=4, pad_multiple=16)


def without_collecting_at_the_start() -> AbstractContextManager[Any]:
    """Keeps train() from visiting all objects of the process at its start and again after its end.

    That takes 0.6 s, most of it for torch's, each time that a process trains. Runs of train.py do it, and
    test_garbage.py tests it.
    """
    return patch("vlmdata.model.training.loop.only_new_objects_collected", nullcontext)


def train_here(out: Path, data: Path, resume: bool = False, collected: bool = False, **settings: Any) -> Any:
    """Trains in this process, in the groups of ``one_process``; settings as ``group__name``.

    With ``collected``, the run collects garbage at its start, as runs of train.py do.
    """
    from vlmdata.model.parallel import groups
    from vlmdata.model.training.loop import train
    from vlmdata.model.training.settings.config_loading import load_config

    changed = {name.replace("__", "."): value for name, value in settings.items()}
    merged = SETTINGS | {"data.paths": [str(data)], "run.out": str(out)} | changed
    if "model.hf" in changed:
        del merged["model.preset"]
    groups.seed_all(merged.get("run.seed", 1234))
    with nullcontext() if collected else without_collecting_at_the_start():
        return train(load_config(None, list(merged.items())), torch.device("cpu"), resume)


@pytest.fixture
def run(one_process: None, chats: Path, tmp_path: Path) -> Callable[..., Any]:
    """:func:`train_here` below the test's own folder."""

    def start(out: str = "run", resume: bool = False, **settings: Any) -> Any:
        return train_here(tmp_path / out, chats, resume, **settings)

    return start


@pytest.fixture(scope="package")
def whole(one_process: None, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run of six steps: what those that something happened to are compared with."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train_here(out, chats)
    return out


def command(data: Path, out: Path, *options: str, processes: int = 1, steps: int = 6) -> list[str]:
    """The command line of the same run."""
    python = [sys.executable, "-W", "ignore"]
    if processes > 1:
        python = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--standalone"]
    settings = SETTINGS | {"run.steps": steps}
    given = {"--preset": "model.preset", "--hf": "model.preset", "--capacity": "data.capacity"}
    settings = {name: value for name, value in settings.items() if name not in {given.get(each) for each in options}}
    sets = [part for name, value in settings.items() for part in ("--set", f"{name}={json.dumps(value)}")]
    return [*python, str(ROOT / "train.py"), "--data", str(data), "--out", str(out), *sets, *options]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def steps_of(out: Path) -> list[dict[str, Any]]:
    """What the log says of each step; of a step that was made twice, the later line."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    by_step = {line["step"]: line for line in lines if "event" not in line}
    return [by_step[step] for step in sorted(by_step)]


def evaluations_of(out: Path) -> list[dict[str, Any]]:
    """What the log says of evaluations, in order."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("event") == "evaluation"]
