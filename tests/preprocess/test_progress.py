"""Lines of progress in a log."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preprocess.progress import Snapshot, pause_after, progress_line

SNAPSHOT = Snapshot(
    rows=100, images=90, tokens=9000, rejected=0, images_per_second=36.9, tokens_per_second=3690, rows_per_second=41.0
)


@pytest.mark.parametrize(
    ("changed", "rows", "done", "line"),
    [
        ({}, 1000, 3, "shard 3/30, 10 %, 41 rows/s, 22 s left"),
        ({}, 7000, 0, "shard 0/30, 1 %, 41 rows/s, 3 min left"),
        ({}, 1_000_000, 0, "shard 0/30, 0 %, 41 rows/s, 6 h 47 min left"),
        ({"rejected": 1200}, 1000, 3, "shard 3/30, 10 %, 41 rows/s, 22 s left, 1,200 rejected"),
        ({"rows_per_second": 0.44}, 100, 30, "shard 30/30, 100 %, 0.4 rows/s"),
        ({"rows": 0, "rows_per_second": 0.0}, 1000, 0, "shard 0/30, 0 %, starting"),
        ({"rows": 999}, 1000, 29, "shard 29/30, 99 %, 41 rows/s, 1 s left"),
        ({"rows": 0, "rows_per_second": 0.0}, 0, 30, "shard 30/30, 0 %"),
    ],
)
def test_line(changed: dict[str, float], rows: int, done: int, line: str) -> None:
    assert progress_line(dataclasses.replace(SNAPSHOT, **changed), rows, done, 30) == line


@given(st.floats(0, 1e7))
def test_lines_come_soon_at_first_and_seldom_later(elapsed: float) -> None:
    assert 10 <= pause_after(elapsed) <= 300
    assert pause_after(elapsed) <= max(10, 0.1 * elapsed)


def test_a_run_of_ten_hours_prints_less_than_200_lines() -> None:
    now, lines = 0.0, 0
    while now < 36_000:
        now += pause_after(now)
        lines += 1
    assert lines < 200
