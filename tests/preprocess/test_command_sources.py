"""``vlmdata preprocess`` over sources of several kinds, splits and held-out rows, as its user meets it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.preprocess.command_line import SMALL_IMAGES
from vlmdata.cli.main import main

OPTIONS = ("--recipe", "chat", "-j", 1, "--rows-per-shard", 4, *SMALL_IMAGES)


@pytest.fixture
def vlmdata(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the command in this process; gives its exit code, stdout and stderr."""

    def call(*arguments: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["vlmdata", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "400")
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        output = capsys.readouterr()
        return int(caught.value.code or 0), output.out, output.err

    return call


def chat_row(n: int) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": f"Say {n}."},
            {"role": "assistant", "content": f"The number is {n}."},
        ]
    }


def write_chats(path: Path, *numbers: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(chat_row(n)) + "\n" for n in numbers))
    return path


class TestRefusals:
    @pytest.mark.parametrize(("name", "problem"), [("nowhere", "does not exist"), ("chats.jsonl", "is no folder")])
    def test_an_image_root_that_is_no_folder_before_anything_is_read(self, tmp_path, vlmdata, name, problem):
        source = write_chats(tmp_path / "chats.jsonl", 1)
        root = tmp_path / name
        code, _, said = vlmdata("preprocess", source, "--image-root", root, "--out", tmp_path / "out", *OPTIONS)
        assert code == 2
        assert f"--image-root {root}: it {problem}; name the folder" in said
        assert "opening" not in said
        assert not (tmp_path / "out").exists()

    def test_the_current_folder_with_several_kinds_of_data(self, tmp_path, vlmdata, monkeypatch):
        write_chats(tmp_path / "a.jsonl", 1)
        (tmp_path / "b.csv").write_text("n\n1\n")
        (tmp_path / "photo.png").write_bytes(b"")
        monkeypatch.chdir(tmp_path)
        code, _, said = vlmdata("preprocess", ".", "--out", "out", *OPTIONS)
        assert code == 2
        assert "data files of several kinds in one folder: 1 JSON lines (a.jsonl), 1 CSV or TSV (b.csv)" in said
        assert "Traceback" not in said
