"""Counts, articles and durations in sentences."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmdata.wording import LaterText, counted, duration, with_article


@pytest.mark.parametrize(
    ("number", "noun", "plural", "words"),
    [
        (1, "shard", None, "1 shard"),
        (0, "shard", None, "0 shards"),
        (2000, "row", None, "2,000 rows"),
        (2, "patch", None, "2 patches"),
        (3, "query", None, "3 queries"),
        (2, "key", None, "2 keys"),
        (2, "row of text", "rows of text", "2 rows of text"),
        (1, "row of text", "rows of text", "1 row of text"),
    ],
)
def test_counts(number: int, noun: str, plural: str | None, words: str) -> None:
    assert counted(number, noun, plural) == words


@pytest.mark.parametrize("words", ["a user", "an assistant", "a system", "an image", "a tool", "an object"])
def test_articles(words: str) -> None:
    assert with_article(words.split()[1]) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-1, "0.0 s"),
        (0.44, "0.4 s"),
        (9.96, "10 s"),
        (42.4, "42 s"),
        (59.6, "1 min"),
        (125, "2 min 5 s"),
        (3599.7, "1 h"),
        (12_000, "3 h 20 min"),
        (86_399.9, "1 d"),
        (187_200, "2 d 4 h"),
    ],
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


@given(st.floats(0, 1e8))
def test_a_duration_says_the_time_within_one_of_its_smaller_unit(seconds: float) -> None:
    sizes = {"d": 86_400, "h": 3600, "min": 60, "s": 1}
    parts = re.findall(r"([\d.]+) (d|h|min|s)", duration(seconds))
    said = sum(float(number) * sizes[unit] for number, unit in parts)
    smaller = {"d": 3600, "h": 60, "min": 1, "s": 1}[parts[0][1]]
    assert abs(said - seconds) <= smaller
    assert all(float(number) < {"d": 1e9, "h": 24, "min": 60, "s": 60}[unit] for number, unit in parts)


def test_a_later_text_is_made_when_it_is_formatted() -> None:
    made: list[int] = []

    def row(number: int) -> str:
        made.append(number)
        return f"row {number}"

    text = LaterText(row, 3)
    assert not made
    assert f"shard: {text}: changed" == "shard: row 3: changed"
    assert made == [3]
