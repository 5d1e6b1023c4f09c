"""Counts of a run, and lines of progress in a log."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmdata.format.index_row import IndexRow
from vlmdata.format.ledger import Rejection
from vlmdata.format.shard import ItemPlace, Placement
from vlmdata.media.codecs import IMAGE, ItemShape
from vlmdata.preprocess.cli.progress import Snapshot, pause_after, progress_json, progress_line
from vlmdata.preprocess.shards.counters import Counters, Counts
from vlmdata.preprocess.shards.job import RowOutcome
from vlmdata.reasons import Reason

COUNTS = Counts(rows=100, images=90, tokens=9000, bytes=80_000_000, rejects={})
SNAPSHOT = Snapshot(COUNTS, rows=41.0, images=36.9, tokens=3690, bytes=29_520_000)
ITEM = ItemPlace(ItemShape(IMAGE, (1, 4, 4)), 0, 0, 0, 0)
SAMPLE = IndexRow("000000000", 0, 0, Placement(0, 512, 0, 0, 0, {}, 0, (ITEM,)), 10, 16, 1, 1, False, (0,))
REJECTS = {"overlong": 900, "missing_image": 200, "empty_image": 70, "empty_answer": 30}


@pytest.mark.parametrize(
    ("counts", "rate", "rows", "done", "line"),
    [
        ({}, 41.0, 1000, 3, "shard 3/30, 10 %, 41 rows/s, 30 MB/s, 22 s left"),
        ({}, 41.0, 7000, 0, "shard 0/30, 1 %, 41 rows/s, 30 MB/s, 3 min left"),
        ({}, 41.0, 1_000_000, 0, "shard 0/30, 0 %, 41 rows/s, 30 MB/s, 6 h 47 min left"),
        (
            {"rejects": REJECTS},
            41.0,
            1000,
            3,
            "shard 3/30, 10 %, 41 rows/s, 30 MB/s, 22 s left, 1,200 rejected (900 overlong, 200 missing_image, "
            "70 empty_image, …)",
        ),
        ({}, 0.44, 100, 30, "shard 30/30, 100 %, 0.4 rows/s, 30 MB/s"),
        ({"rows": 0}, 0.0, 1000, 0, "shard 0/30, 0 %, starting"),
        ({"rows": 999}, 41.0, 1000, 29, "shard 29/30, 99 %, 41 rows/s, 30 MB/s, 1 s left"),
        ({"rows": 0}, 0.0, 0, 30, "shard 30/30, 0 %"),
    ],
)
def test_line(counts: dict[str, Any], rate: float, rows: int, done: int, line: str) -> None:
    snapshot = dataclasses.replace(SNAPSHOT, counts=dataclasses.replace(COUNTS, **counts), rows=rate)
    assert progress_line(snapshot, rows, done, 30) == line


def test_json_has_all_reasons() -> None:
    snapshot = dataclasses.replace(SNAPSHOT, counts=dataclasses.replace(COUNTS, rejects=REJECTS))
    line = json.loads(json.dumps(progress_json(snapshot, 1000, 3, 30)))
    assert (line["rejected"], line["rejects"]) == (1200, REJECTS)
    assert (line["mb_per_second"], line["rows_per_second"], line["seconds_left"]) == (29.52, 41.0, 22.0)


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.sampled_from(list(Reason)), max_size=3))))
def test_counters_add_up_what_rows_gave(rows: list[tuple[int, list[Reason]]]) -> None:
    counters = Counters(4)
    for shard, reasons in rows:
        rejections = tuple(Rejection(0, reason, "why") for reason in reasons)
        counters.add(shard, RowOutcome(samples=(SAMPLE, SAMPLE), rejections=rejections))
    counts, expected = counters.sum(), Counter(str(reason) for _, reasons in rows for reason in reasons)
    assert (counts.rows, counts.images, counts.tokens, counts.bytes) == tuple(len(rows) * n for n in (1, 2, 20, 1024))
    assert counts.rejects == expected
    assert list(counts.rejects.values()) == sorted(expected.values(), reverse=True)
    counters.start(0)
    assert counters.sum().rows == sum(shard != 0 for shard, _ in rows)


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
