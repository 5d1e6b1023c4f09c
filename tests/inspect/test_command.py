"""``vlmdata inspect`` as a command: JSON for programs, exit codes, messages that help."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chat_rows import turn, write_jsonl
from tests.conftest import build_dataset
from tests.inspect.conftest import Command, once
from tests.inspect.raw import read_samples
from tests.preprocess.command_line import start


def as_json(command: Command, *arguments: object) -> Any:
    code, out, _ = command(*arguments, "--json")
    assert code == 0
    assert out.isascii()
    return json.loads(out)


def test_every_view_has_a_json_form(demo: Path, tmp_path: Path, command: Command) -> None:
    raw = read_samples(demo)
    card = as_json(command, demo)
    assert card["totals"]["samples"] == len(raw) == card["checked"]
    sample = as_json(command, demo, "--sample", "1")
    assert sample["tokens"]["ids"] == raw[1].ids.tolist()
    assert sample["tokens"]["h"] == raw[1].positions[1].tolist()
    pack = as_json(command, demo, "--pack", 0, "--cp", 2)
    assert [rank["rank"] for rank in pack["ranks"]] == [0, 1]
    step = as_json(command, demo, "--step", "1:0", "--dp", 2, "--dp-rank", 1)
    assert {each["dp_rank"] for each in step["packs"]} == {1}
    row = as_json(command, demo, "--row", 3)
    assert (row["trace"]["candidates"][0]["key"], row["samples"][0]["source_row"]) == ("000000003", 3)
    found = as_json(command, demo, "--find", "row>=2 row<=3")
    assert [each["source_row"] for each in found["samples"]] == [2, 3]
    written = as_json(command, demo, "--html", tmp_path / "page.html", "--samples", 2)
    assert written["samples"] == 2
    assert written["bytes"] == (tmp_path / "page.html").stat().st_size


def test_a_rejected_row_says_why(mixed: Path, command: Command) -> None:
    code, out, _ = command(mixed, "--row", 3)
    assert code == 0
    assert "no_assistant_turn" in out
    assert as_json(command, mixed, "--row", 3)["samples"] == [None]


WRONG: list[tuple[list[str], str]] = [
    (["--sample", "000000099"], "no sample '000000099'; keys run from 000000000 to 000000007"),
    (["--sample", "8"], "no sample 8: the dataset has 8, numbered 0 to 7"),
    (["--row", "8"], "no source row 8: the source has 8"),
    (["--pack", "99"], "no batch 99"),
    (["--step", "0:99"], "no step 99"),
    (["--step", "99"], "--step '99': give EPOCH:STEP"),
    (["--step", "0:0", "--dp", "2", "--dp-rank", "2"], "dp_rank 2 of dp_size 2"),
    (["--find", "colour<3"], "conditions are FIELD<NUMBER"),
    (["--pack", "0", "--capacity", "64"], "longer than capacity 64"),
    (["--pack", "0", "--sample", "0"], "--sample and --pack: choose only one"),
    (["--tokens"], "--tokens needs --sample or --row"),
    (["--samples", 4], "--samples needs --html"),
    (["--keys", "1", "--serve"], "--keys needs --html"),
    (["--port", 8765], "--port needs --serve"),
    (["--check", "all", "--sample", "1"], "--check needs --find or --html or --serve"),
    (["--epoch", 1], "--epoch needs --pack or --row or --html or --serve"),
    (["--check", "some"], "--check 'some': give a number of samples, or all"),
    (["--pack", "0", "--cost", "70b"], "no cost model for '70b'"),
    (["--pack", "0", "--weights", "a,b"], "--weights 'a,b'"),
    (["--html", "x.html", "--keys", "nobody"], "no sample 'nobody'"),
    (["--html", "s3://bucket/x.html"], "--html s3://bucket/x.html: the page must be a local file"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG)
def test_wrong_requests_end_with_2_and_say_what_is_right(
    demo: Path, command: Command, arguments: list[str], words: str
) -> None:
    code, out, error = command(demo, *arguments)
    assert code == 2
    assert out == ""
    joined = " ".join(re.sub(r"[│╭╰─╮╯]", " ", error).split())
    assert words in joined


def test_no_dataset_ends_with_2(tmp_path: Path, command: Command) -> None:
    code, _, error = command(tmp_path)
    assert code == 2
    assert "not a vlmdata dataset" in error


def test_a_lost_shard_ends_with_2_and_its_name(demo: Path, copy_of: Callable[[Path], Path], command: Command) -> None:
    copy = copy_of(demo)
    (copy / "shard-000001.tar").unlink()
    code, _, error = command(copy)
    assert code == 2
    assert "shard-000001.tar" in error


def test_a_page_that_cannot_be_written_ends_with_3(demo: Path, tmp_path: Path, command: Command) -> None:
    code, _, error = command(demo, "--html", tmp_path / "no" / "page.html", "--samples", 1)
    assert code == 3
    assert error.endswith("cannot write the page: No such file or directory\n"), "not the name of a temporary file"
    file = tmp_path / "file"
    file.touch()
    code, _, error = command(demo, "--html", file / "page.html", "--samples", 1)
    assert code == 3
    assert error.endswith("cannot write the page: Not a directory\n")


def test_several_datasets_are_for_packs_and_steps(demo: Path, mixed: Path, command: Command) -> None:
    step = as_json(command, demo, mixed, "--step", "0:0", "--global-batch", 64)
    assert {sample["dataset"] for pack in step["packs"] for sample in pack["samples"]} == {0, 1}
    code, _, error = command(demo, mixed, "--sample", 0)
    assert code == 2
    assert "--sample reads one dataset, got 2" in " ".join(error.split())


@pytest.fixture(scope="module")
def empty(shared_folder: Path) -> Path:
    """A dataset all of whose rows were rejected."""

    def make(out: Path) -> None:
        source = write_jsonl(out / "rows.jsonl", [{"messages": [turn("user", "Nobody answers.")]}] * 3)
        build_dataset(source, out / "dataset", recipe="chat")

    return once(shared_folder, "empty", make) / "dataset"


def test_a_dataset_without_samples_is_shown_as_far_as_it_goes(empty: Path, tmp_path: Path, command: Command) -> None:
    code, out, _ = command(empty)
    assert code == 0
    assert "no_assistant_turn" in out
    assert "no samples" in out
    assert as_json(command, empty)["totals"]["rejected"] == 3
    assert as_json(command, empty, "--find", "x")["samples"] == []
    assert command(empty, "--row", 1)[0] == 0
    assert command(empty, "--html", tmp_path / "page.html")[0] == 0
    code, _, error = command(empty, "--sample", 0)
    assert code == 2
    assert "has none" in " ".join(error.split())
    assert command(empty, "--pack", 0)[0] == 2


def test_steps_of_a_remote_dataset(demo: Path, command: Command) -> None:
    local = as_json(command, demo, "--step", "0:0", "--capacity", 2048)
    remote = as_json(command, demo.as_uri(), "--step", "0:0", "--capacity", 2048)
    assert remote["packs"] == local["packs"]


def test_the_server_starts_says_where_and_ends_on_ctrl_c(mixed: Path) -> None:
    process = start("inspect", mixed, "--serve", "--port", 0, "--json")
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        url = json.loads("".join(lines))["url"]
        assert url.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(url + "api/samples", timeout=120) as answer:
            assert len(json.load(answer)["rows"]) == 6
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.communicate()
