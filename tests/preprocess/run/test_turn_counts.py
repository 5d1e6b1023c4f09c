"""What the chat template does to assistant turns is counted, shown, found by inspect, and refused by ``--strict``."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.chat_rows import turn, write_jsonl
from tests.conftest import tree_bytes
from tests.preprocess.chat.unusual import write_tokenizer
from tests.preprocess.command_line import TOKENIZER, Ended
from vlmdata.format.ledger import read_ledger
from vlmdata.format.manifest import Manifest
from vlmdata.inspect import describe_dataset, describe_sample
from vlmdata.inspect.findings import Severity
from vlmdata.inspect.terminal.card import print_card
from vlmdata.preprocess.cli.report import report_of
from vlmdata.preprocess.config import ImageConfig, PreprocessConfig, TrainTurns
from vlmdata.preprocess.run.dataset import RunResult, Watcher, preprocess_dataset
from vlmdata.preprocess.sources.open import open_source
from vlmdata.reasons import Reason
from vlmdata.storage import open_store
from vlmdata.storage.join import join_datasets
from vlmdata.storage.open import open_dataset
from vlmdata.verify.dataset import verify_dataset


def says(text: str, reasoning: str | None = None, **fields: Any) -> dict[str, Any]:
    return turn("assistant", text) | ({} if reasoning is None else {"reasoning_content": reasoning}) | fields


CALL = {"tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}]}


def rows() -> list[dict[str, Any]]:
    """Four turns drop reasoning, in two rows; four rows have answers that inference never has after this text."""
    a, b, c = (turn("user", text) for text in ("One?", "Two?", "Three?"))
    return [
        {"messages": [a, says("1", "One, I think."), b, says("2", "Then two."), c, says("3", "So three.")]},
        {"messages": [a, says("<think>\nInside.\n</think>\n\n1"), b, says("2", "Kept.")]},
        {"messages": [a, says("1"), b, says("2")]},
        {"messages": [a, says("1", "Only one.")]},
        {"messages": [a, says("", "Look first.", **CALL), {"role": "tool", "content": "a 1"}, says("1", "Seen.")]},
        {"messages": [a, says("1", "  "), b, says("2", loss=False)]},
        {"messages": [a, says("4", "4"), b]},
    ]


COUNTS = {
    "dropped_reasoning": 4,
    "rows_unlike_inference": 5,
    "rows_with_dropped_reasoning": 3,
}


def run(source: Path, out: Path, watcher: Watcher | None = None, **options: Any) -> RunResult:
    config = PreprocessConfig(recipe="chat", image=ImageConfig(1024, 65_536), rows_per_shard=2, **options)
    return preprocess_dataset(open_source(str(source), recipe="chat"), out, config, watcher=watcher)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("turns") / "rows.jsonl", rows())


@pytest.fixture(scope="module")
def whole(source: Path) -> RunResult:
    return run(source, source.with_name("all"))


def summary(out: Path, result: RunResult) -> str:
    console = Console(record=True, width=200, file=io.StringIO())
    report_of(open_store(out), result, 1.0, 1.0).print(console)
    return console.export_text()


def test_are_counted_and_stored_with_the_sample(whole: RunResult, source: Path) -> None:
    assert whole.manifest.turns == COUNTS
    dataset = open_dataset(source.with_name("all"))
    assert dataset.manifest == whole.manifest
    dropped = [dataset.metadata(i).get("dropped_reasoning") for i in range(len(dataset))]
    assert dropped == [2, 1, None, None, None, None, 1]
    assert verify_dataset(source.with_name("all")).faults == []


def test_counts_survive_an_interruption_and_a_join(whole: RunResult, source: Path, tmp_path: Path) -> None:
    def stop(record: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(source, tmp_path / "stopped", Watcher(shard_done=stop))
    assert run(source, tmp_path / "stopped").kept == 1
    assert tree_bytes(tmp_path / "stopped") == tree_bytes(source.with_name("all"))
    parts = [open_store(source.with_name("all")), open_store(tmp_path / "stopped")]
    joined = join_datasets(parts, open_store(tmp_path / "joined"), allow_duplicates=True).manifest
    assert joined.turns == {name: 2 * count for name, count in COUNTS.items()}


def test_the_summary_says_what_was_chosen_and_recommends_a_sample_for_each_turn(whole: RunResult, source: Path) -> None:
    said = summary(source.with_name("all"), whole)
    assert "\nlearned: all assistant turns (--train-turns all)\n" in said
    assert "reasoning of 4 earlier turns in 3 rows is dropped by the template\n" in said
    assert "5 rows with answers learned in another context than at inference: the template writes the last " in said
    assert "  recommended: --train-turns each, a sample for each turn" in said
    shown = report_of(open_store(source.with_name("all")), whole, 1.0, 1.0).to_json()
    assert (shown["train_turns"], shown["turns"]) == ("all", COUNTS)


def test_with_a_sample_for_each_turn_nothing_is_lost(source: Path, tmp_path: Path) -> None:
    result = run(source, tmp_path / "out", train_turns=TrainTurns.EACH, strict=True)
    assert result.manifest.turns == {}
    assert result.manifest.rejects == {}
    assert "turns" not in json.loads((tmp_path / "out" / "manifest.json").read_text())
    said = summary(tmp_path / "out", result)
    assert "\nlearned: each assistant turn, in a sample of its own (--train-turns each)\n" in said
    assert "recommended" not in said
    assert "dropped" not in said


def test_strict_rejects_rows_whose_reasoning_is_dropped(source: Path, tmp_path: Path) -> None:
    result = run(source, tmp_path / "out", strict=True)
    assert (result.manifest.totals.samples, result.manifest.turns) == (4, {"rows_unlike_inference": 2})
    rejections = list(read_ledger(tmp_path / "out" / "rejected.jsonl"))
    assert [(each.row, each.reason) for each in rejections] == [(n, Reason.TEMPLATE_ERROR) for n in (0, 1, 6)]
    assert rejections[0].message.startswith(
        "the chat template drops the reasoning of assistant turns 1 and 2 of 3. --strict rejects such rows; "
        "--train-turns each learns every turn with its reasoning."
    )
    assert "--train-turns each" in rejections[2].message


def test_a_template_without_reasoning_drops_that_of_last_turns_too(source: Path, tmp_path: Path) -> None:
    name = write_tokenizer(tmp_path / "tokenizer")
    for turns, said in (
        (TrainTurns.ALL, "reasoning of 2 earlier turns in 2 rows is dropped by the template\n"),
        (TrainTurns.EACH, "reasoning of 3 last turns in 2 rows is dropped by the template\n"),
    ):
        a, b = turn("user", "One?"), turn("user", "Two?")
        made = [{"messages": [a, says("1", "x"), b, says("2", "y")]}, {"messages": [a, says("1", "z"), b]}]
        path = write_jsonl(tmp_path / "rows.jsonl", made)
        result = run(path, tmp_path / turns, train_turns=turns, tokenizer=name)
        assert said in summary(tmp_path / turns, result)
        assert "rows_unlike_inference" not in result.manifest.turns
        assert "recommended" not in summary(tmp_path / turns, result)
        run(path, tmp_path / f"strict {turns}", train_turns=turns, tokenizer=name, strict=True)
        first = next(read_ledger(tmp_path / f"strict {turns}" / "rejected.jsonl"))
        assert "--train-turns each" not in first.message


def test_rows_alike_under_the_template_say_nothing_and_keep_the_manifest(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"messages": [turn("user", "?"), says("!")]}])
    result = run(path, tmp_path / "out")
    assert "turns" not in json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert "recommended" not in summary(tmp_path / "out", result)


def test_documents_have_no_turns_to_choose(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "A text."}])
    config = PreprocessConfig(recipe="text")
    result = preprocess_dataset(open_source(str(path), recipe="text"), tmp_path / "out", config)
    assert "learned:" not in summary(tmp_path / "out", result)


def test_inspect_finds_them(whole: RunResult, source: Path) -> None:
    dataset = open_dataset(source.with_name("all"))
    for check in (None, 0):
        card = describe_dataset(dataset, check=check)
        found = {group.kind: group for group in card.findings}
        dropped = found["dropped_reasoning"]
        assert (dropped.severity, dropped.count) == (Severity.WARNING, 3)
        assert [example.source_row for example in dropped.examples] == ([0, 1, 6] if check is None else [])
        console = Console(record=True, width=200, file=io.StringIO())
        print_card(console, card)
        assert "dropped_reasoning 3 of 7: the chat template dropped reasoning" in console.export_text()
    (finding,) = (f for f in describe_sample(dataset, "000000000").findings if f.kind == "dropped_reasoning")
    assert finding.message == "the chat template dropped the reasoning of 2 of the assistant's turns"
    assert not [f for f in describe_sample(dataset, "000000004").findings if f.severity is Severity.WARNING]


def test_trace_shows_each_turn_and_what_is_dropped(source: Path, vlmdata: Callable[..., Ended]) -> None:
    shown = [
        vlmdata("preprocess", source, "--trace", 0, "--train-turns", turns, *TOKENIZER).stdout
        for turns in ("all", "each")
    ]
    assert "reasoning of so many turns, by the template" in shown[0]
    assert "sample 000000000-000 to 000000000-002" in shown[1]
    assert "turn 000000000-002" in shown[1]
    assert "by the template" not in shown[1]
    assert Manifest.read(source.with_name("all")).totals.samples == 7
