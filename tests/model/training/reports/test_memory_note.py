"""A word if steps wait for device memory."""

from __future__ import annotations

import dataclasses

import pytest

from vlmdata.model.training.reports.step_notes import MemoryNote
from vlmdata.model.training.step import StepResult

STEP = StepResult(1.0, {}, 1.0, 1, 1, 1, 0, 0, 1.0, 1.0, 0.0, 112 << 30, False, (), ())


def notes(retries: list[int]) -> list[tuple[int, str]]:
    """What is said, with the number of the step; ``retries`` of each step."""
    watch = MemoryNote()
    said = [(n, watch.note(dataclasses.replace(STEP, memory_retries=each))) for n, each in enumerate(retries, 1)]
    return [(number, note) for number, note in said if note is not None]


def test_retries_in_every_step_are_reported_once() -> None:
    (said,) = notes([2] * 100)
    assert said[0] == 30
    assert said[1].startswith("20 of the last 20 steps found no free device memory")
    assert "(tensors need up to 112.0 GiB on a GPU): lower --capacity" in said[1]


def test_those_that_begin_late_are_reported_when_half_of_the_steps_have_them() -> None:
    ((number, note),) = notes([0] * 50 + [1] * 50)
    assert number == 60
    assert note.startswith("10 of the last 20")


@pytest.mark.parametrize("retries", [[0] * 99, [3] * 10 + [0] * 90, [1, 0, 0] * 33], ids=["none", "first", "few"])
def test_few_are_not(retries: list[int]) -> None:
    assert notes(retries) == []
