"""``--trace ROW``: what a recipe and the tokenizer make of a row, or why they make nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chat_rows import data_uri, image_item, turn, write_jsonl
from tests.list_recipe import LIST_ROWS, NAME
from tests.preprocess.command_line import TOKENIZER, Ended

Trace = Callable[..., Ended]


@pytest.fixture
def trace(vlmdata: Callable[..., Ended], tmp_path: Path) -> Trace:
    """Runs ``vlmdata preprocess`` in this process; gives exit code, stdout and stderr."""
    source = write_jsonl(tmp_path / "rows.jsonl", [*LIST_ROWS, {"form": "list", "samples": 3}])

    def run(row: int, *arguments: object, of: Path = source, recipe: str = NAME) -> Ended:
        before = sorted(tmp_path.iterdir())
        ended = vlmdata("preprocess", of, *TOKENIZER, "--recipe", recipe, "--trace", row, *arguments)
        assert sorted(tmp_path.iterdir()) == before  # nothing is written
        return ended

    return run


def test_each_sample_of_a_list_is_shown_or_says_why_not(trace: Trace) -> None:
    code, out, _ = trace(1)
    assert code == 1
    assert "returned a list of 4" in out
    assert [line.split()[1] for line in out.splitlines() if line.startswith("sample ")] == [
        f"000000001-{i:03d}" for i in range(4)
    ]
    assert out.count("⟦Two.<|im_end|>↵\n⟧") == out.count("⟦Three.<|im_end|>↵\n⟧") == 1
    assert "empty_answer" in out
    assert "missing_column" in out


def test_turns_images_and_tokens_of_a_conversation_are_shown(trace: Trace, tmp_path: Path) -> None:
    row = {
        "messages": [
            turn("user", image_item(width=96, height=64), "Which\x1b[31m one?"),
            {"role": "assistant", "content": "That one.", "reasoning_content": "I see two."},
        ]
    }
    code, out, _ = trace(0, "--min-pixels", 1024, of=write_jsonl(tmp_path / "chat.jsonl", [row]), recipe="chat")
    assert code == 0
    words = " ".join(out.split())
    assert "PNG of 96 × 64, stored as 96 × 64: 6 tokens" in words
    assert "<|vision_start|><|image_pad|> × 6<|vision_end|>Which\\x1b[31m one?" in out
    assert "I see two. reasoning" in words
    assert "⟦<think>↵\nI see two.↵\n</think>↵\n↵\nThat one.<|im_end|>↵\n⟧" in out
    assert "\x1b" not in out


def test_keys_that_are_not_used_are_shown(trace: Trace, tmp_path: Path) -> None:
    row = {"id": 1, "mood": "fine", "messages": [turn("user", "?"), turn("assistant", "yes")]}
    out = trace(0, of=write_jsonl(tmp_path / "chat.jsonl", [row]), recipe="chat")[1]
    words = " ".join(out.split())
    assert "unused keys id harmless unused keys mood unknown to the recipe" in words


def test_characters_of_keys_that_a_terminal_cannot_show_are_escaped(trace: Trace, tmp_path: Path) -> None:
    row = {"messages": [turn("user", "Hi"), turn("assistant", "b")], "k\ud800": 1, "k\x1b[31m": 2}
    code, out, _ = trace(0, of=write_jsonl(tmp_path / "chat.jsonl", [row]), recipe="chat")
    assert code == 0
    assert r"k\ud800" in out
    assert r"k\x1b[31m" in out.partition("recipe chat")[0]


def test_a_split_document_shows_its_pieces(trace: Trace, tmp_path: Path) -> None:
    picture = data_uri(width=128, height=128)
    row = {"text": "A picture: <image><image>" + "word " * 20, "images": [picture, picture]}
    rows = write_jsonl(tmp_path / "documents.jsonl", [row])
    code, out, _ = trace(0, "--overlong", "split", "--max-length", 18, "--min-pixels", 1024, of=rows, recipe="text")
    assert code == 1
    keys = [line.split()[1] for line in out.splitlines() if line.startswith("piece ")]
    assert keys == [f"000000000-{i:03d}" for i in range(len(keys))]
    assert len(keys) > 3
    assert out.count("no_targets") == 2
    assert "document  A picture:" in out
    assert "<|endoftext|>⟧" in out.splitlines()[-1]


def test_a_failing_recipe_shows_its_traceback(trace: Trace) -> None:
    code, out, _ = trace(6)
    assert code == 1
    assert f"recipe {NAME} failed:\nTraceback (most recent call last):" in out
    assert 'raise KeyError("answer")' in out
    assert "KeyError: 'answer'" in out.splitlines()[-1]
    assert "TypeError: 'int' object is not iterable" in trace(8)[1]


def test_a_row_of_no_samples_and_a_row_that_is_none(trace: Trace, tmp_path: Path) -> None:
    assert "no_samples" in trace(2)[1]
    (tmp_path / "bad.jsonl").write_text("{\n")
    code, out, _ = trace(0, of=tmp_path / "bad.jsonl")
    assert (code, "malformed_row" in out) == (1, True)


@pytest.mark.parametrize("row", [9, -1])
def test_a_row_outside_the_source_is_refused(trace: Trace, row: int) -> None:
    code, _, error = trace(row)
    assert code == 2
    assert f"--trace {row}: the source has 9 rows, numbered from 0" in error


def test_a_run_with_unexpected_errors_suggests_it(trace: Trace, tmp_path: Path, vlmdata: Callable[..., Ended]) -> None:
    options = (*TOKENIZER, "--recipe", NAME, "--max-reject-rate", 1, "-j", 1)
    arguments = ("preprocess", tmp_path / "rows.jsonl", *options, "--out")
    ended = vlmdata(*arguments, tmp_path / "out")
    assert not ended.code
    assert "unexpected errors: add --trace 6 to the command for the first traceback" in ended.stdout
    ended = vlmdata(*arguments, tmp_path / "both", "--holdout", 0.5)
    assert re.search(r"unexpected errors: add --trace [68] to the command", ended.stdout)
    assert 'raise KeyError("answer")' in trace(6, "--holdout", "0.5")[1]
    lines = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    (found,) = [line["message"] for line in lines if line["row"] == 6]
    assert found.startswith("KeyError: 'answer' (in _made, tests/list_recipe.py:")


def test_it_goes_without_out_and_without_json(trace: Trace) -> None:
    assert "--trace prints text" in " ".join(trace(0, "--json")[2].split())
