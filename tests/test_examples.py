"""The scripts in ``examples/`` run as they are, and find what they promise: they check it themselves.

They run in the test's own process, and so do the ``vlmdata`` commands that they start: a process of each would spend
most of its time with imports.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vlmdata.cli.main import main

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {
    "receipts": ["--rows", "16", "--steps", "2"],
    "blend": ["--rows", "16"],
    "transformers_packs": ["--rows", "12", "--steps", "2"],
    "rollouts": ["--rows", "6"],
}
EXPECTED = {
    "receipts": "in the trainer",
    "blend": "resumed after 2 packs: the same",
    "transformers_packs": "their losses differ by at most",
    "rollouts": "came from the service by key, equal to the stored samples",
}

pytestmark = pytest.mark.slow


def test_each_example_is_run() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == SCRIPTS.keys()


@pytest.fixture
def commands_in_this_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs ``vlmdata`` here where a script starts it, and names the commands; other programs run as they would."""
    commands: list[str] = []
    start = subprocess.run

    def run(command: Any, **options: Any) -> Any:
        words = [str(word) for word in command]
        if words[0] != str(Path(sys.executable).with_name("vlmdata")):
            return start(command, **options)
        assert options == {"check": True}
        commands.append(words[1])
        # One shard needs no worker processes, which would run the script that is this process's main module.
        words += ["--rows-per-shard", "256"] if words[1] == "preprocess" else []
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", words)
            with pytest.raises(SystemExit) as ended:
                main()
        assert not ended.value.code, words
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_runs(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    commands_in_this_process: list[str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    if name == "receipts":
        pytest.importorskip("megatron.core")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "argv", [f"examples/{name}.py", "--out", str(tmp_path / "out"), *SCRIPTS[name]])
    runpy.run_path(f"examples/{name}.py", run_name="__main__")
    assert EXPECTED[name] in capfd.readouterr().out
    assert "preprocess" in commands_in_this_process
