"""Training on pixels that are decoded: equal losses, and a word if steps wait for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import vlmdata
from tests.chat_rows import write_jsonl
from tests.model.small_vocabulary import build_chats
from tests.model.training.conftest import short_rows, steps_of, train_here
from vlmdata.media.codecs import RAW, REGISTRY
from vlmdata.model.training.reports.step_notes import DataWait, decoded_codecs
from vlmdata.model.training.step import StepResult
from vlmdata.preprocess.config import ImageConfig


def result(wait: float) -> StepResult:
    """A step of one second."""
    return StepResult(1.0, {}, 1.0, 1, 1, 1, 0, 0, 1.0, 1.0, wait, 0, False, (), ())


def notes(waits: list[float]) -> list[tuple[int, str]]:
    watch = DataWait(2, ["jxl", "source"])
    said = [(number, watch.note(result(wait))) for number, wait in enumerate(waits)]
    return [(number, note) for number, note in said if note is not None]


def test_waits_over_a_twentieth_are_reported_once() -> None:
    (said,) = notes([0.9] + [0.25] * 60)
    assert said[0] == 20
    assert "waited for data 25% of their time: raise --workers (num_workers of the loader), now 2 per rank" in said[1]
    assert said[1].endswith("decode pixels stored as jxl and source")


@pytest.mark.parametrize("waits", [[30.0] + [0.05] * 50, [0.0] * 50, [0.9] * 20])
def test_a_slow_start_or_a_little_waiting_is_not(waits: list[float]) -> None:
    assert notes(waits) == []


def test_waiting_that_begins_late_is() -> None:
    assert [number for number, _ in notes([0.0] * 50 + [1.0] * 5)] == [51]


def test_losses_are_the_same_to_the_last_digit_under_every_codec(one_process: None, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "chat.jsonl", short_rows(24))
    losses = {}
    for name in REGISTRY:
        options: dict[str, Any] = {"image": ImageConfig(1024, 16384), "pixels": name}
        data = build_chats(source, tmp_path / name, **options)
        assert decoded_codecs([vlmdata.open_dataset(data)]) == [name] * (name != RAW)
        train_here(tmp_path / f"{name}-run", data, run__steps=2)
        losses[name] = [(step["loss"], step["grad_norm"]) for step in steps_of(tmp_path / f"{name}-run")]
    assert len(losses[RAW]) == 2
    assert all(found == losses[RAW] for found in losses.values())
