"""The scripts in ``examples/`` run as they are, and find what they promise: they check it themselves.

They run in the test's own process, and so do the ``vlmdata`` commands that they wait for: a process of each would spend
most of its time with imports. What needs a process of its own, the trainer and the server, is forked.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.forked import MODELS, Forked
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
COMMANDS = {
    "receipts": {"preprocess", "verify", "train", "convert"},
    "blend": {"preprocess"},
    "transformers_packs": {"preprocess"},
    "rollouts": {"preprocess", "serve"},
}
VLMDATA = str(Path(sys.executable).with_name("vlmdata"))

pytestmark = pytest.mark.slow


def test_each_example_is_run() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == SCRIPTS.keys()


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs ``vlmdata`` here where a script waits for it, forks ``train`` and servers, and names the commands."""
    commands: list[str] = []
    usual_run, usual_start = subprocess.run, subprocess.Popen

    def run(command: Any, **options: Any) -> Any:
        words = [str(word) for word in command]
        if words[0] not in (VLMDATA, sys.executable):
            return usual_run(command, **options)
        assert options == {"check": True}
        assert words[0] == VLMDATA
        commands.append(words[1])
        if words[1] == "train":
            assert Forked(str(ROOT / "train.py"), words[1:], server=MODELS).wait() == 0
            return subprocess.CompletedProcess(words, 0)
        # One shard needs no worker processes, which would run the script that is this process's main module.
        words += ["--rows-per-shard", "256"] if words[1] == "preprocess" else []
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", words)
            with pytest.raises(SystemExit) as ended:
                main()
        assert not ended.value.code, words
        return subprocess.CompletedProcess(words, 0)

    def start(command: Any, **options: Any) -> subprocess.Popen[Any]:
        words = [str(word) for word in command]
        if words[:2] != [VLMDATA, "serve"]:
            return usual_start(command, **options)
        commands.append("serve")
        return Forked("vlmdata.cli.main:main", words, **options)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(subprocess, "Popen", start)
    return commands


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_runs(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    commands: list[str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    if name == "rollouts":
        import ray  # noqa: F401  # it derives classes from Popen, which the commands replace
    if name == "receipts":
        pytest.importorskip("megatron.core")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "argv", [f"examples/{name}.py", "--out", str(tmp_path / "out"), *SCRIPTS[name]])
    runpy.run_path(f"examples/{name}.py", run_name="__main__")
    assert EXPECTED[name] in capfd.readouterr().out
    assert set(commands) == COMMANDS[name]
