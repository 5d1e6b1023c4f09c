"""What the summary says of keys, of rows of another form, and of rows that the data does not want learned."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.chat_rows import turn, write_jsonl
from tests.preprocess.command_line import TOKENIZER, Ended

Command = Callable[..., Ended]


def chat(number: int, **more: Any) -> dict[str, Any]:
    return {"messages": [turn("user", f"{number}?"), turn("assistant", "Yes.")], **more}


def test_characters_of_keys_that_a_terminal_obeys_are_escaped(vlmdata: Command, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", [chat(n, **{"k\x1b[31m\nk": 1}) for n in range(3)])
    ended = vlmdata("preprocess", source, "--out", tmp_path / "out", *TOKENIZER)
    assert r"k\x1b[31m\nk (3 samples)" in ended.stdout
    assert "\x1b" not in ended.stdout + ended.stderr


def test_a_later_row_of_another_form_is_said_to_be_one(vlmdata: Command, tmp_path: Path) -> None:
    rows = [*(chat(n) for n in range(100)), {"text": "A document.", "id": 3}, chat(101), {"speech": "none"}]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    ended = vlmdata("preprocess", source, "--out", tmp_path / "out", *TOKENIZER, "--max-reject-rate", 0.5)
    assert ended.code == 0, ended.stderr
    assert "recipe chat, chosen by the columns of the first 100 rows\n" in ended.stderr
    found = "the row is of another form: its columns, text, id, are meant for recipe text, not chat."
    assert found in ended.stdout
    rejected = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    assert [(each["row"], found in each["message"]) for each in rejected] == [(100, True), (102, False)]


def test_rows_of_weight_0_are_no_failure(vlmdata: Command, tmp_path: Path) -> None:
    rows = [chat(n, weight=n % 2) for n in range(10)] + [{"messages": []}] * 2
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    command = ("preprocess", source, "--out", tmp_path / "out", *TOKENIZER)
    failed = vlmdata(*command)
    assert failed.code == 1
    assert "failed: 2 of 12 rows rejected (16.7 %), more than --max-reject-rate 0.01 allows." in failed.said
    ended = vlmdata(*command, "--max-reject-rate", 0.2)
    assert ended.code == 0
    assert "no_targets 5 not counted for --max-reject-rate" in ended.said
    assert "rejected 7 58.33 % of rows" in ended.said
    assert json.loads(vlmdata(*command, "--json").stdout)["reject_rate"] == 2 / 12
