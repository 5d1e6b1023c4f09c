"""What the command line passes on: the options that were given, and nothing for those that were not."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def passed_on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command; gives file, overrides and resume as it would train with them."""
    spec = importlib.util.spec_from_file_location("train_script", ROOT / "train.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    seen: list[Any] = []

    def run(*arguments: str) -> Any:
        monkeypatch.setattr(script, "_run", lambda *what: seen.append(what) or 0)
        done = CliRunner().invoke(script.app, list(arguments))
        assert done.exit_code == 0, done.output
        return seen.pop()

    return run


def test_a_file_keeps_what_is_not_named(passed_on: Any) -> None:
    """As in the line that an interrupted run prints: with data from the file."""
    assert passed_on("--config", "a.toml", "--resume") == (Path("a.toml"), [], True)


def test_what_is_named_wins(passed_on: Any) -> None:
    _, overrides, resume = passed_on(
        "--data", "a", "--data", "b", "--freeze", "vision,merger", "--steps", "3", "--no-sp"
    )
    assert not resume
    found = {name: list(value) if isinstance(value, list | tuple) else value for name, value in overrides}
    assert found == {
        "data.paths": ["a", "b"],
        "model.freeze": ["vision", "merger"],
        "run.steps": 3,
        "parallel.sp": False,
    }


def test_parts_can_be_thawed(passed_on: Any) -> None:
    assert passed_on("--freeze", "")[1] == [("model.freeze", [])]
