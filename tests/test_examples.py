"""The examples find what they promise: they check it themselves. Notebooks are run, which are the scripts in cells.

They run in the test's own process, in an event loop as in Jupyter. So do the ``vlmdata`` commands that they wait for: a
process of each would spend most of its time with imports. What needs one, the trainer and the server, is forked.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.forked import MODELS, Forked
from tools.notebooks import OF_NOTEBOOK, OF_SCRIPT, notebook
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


def test_each_example_is_run_and_a_notebook_of_the_same_code() -> None:
    scripts = list((ROOT / "examples").glob("*.py"))
    assert {path.stem for path in scripts} == SCRIPTS.keys()
    for path in scripts:
        assert path.read_text().count(OF_SCRIPT) == 1
        assert path.with_suffix(".ipynb").read_text() == notebook(path.read_text()), "run python -m tools.notebooks"


async def run_cells(name: str, options: list[str]) -> None:
    """Runs the code of a notebook with options in its place, as a main module."""
    cells = json.loads((ROOT / "examples" / f"{name}.ipynb").read_text())["cells"]
    module = ModuleType("__main__")
    for number, cell in enumerate(each for each in cells if each["cell_type"] == "code"):
        code = "".join(cell["source"]).replace(OF_NOTEBOOK, f"parser.parse_args({options})")
        exec(compile(code, f"{name}, cell {number}", "exec"), module.__dict__)


@pytest.fixture
def commands(name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs ``vlmdata`` here where a script waits for it, forks ``train`` and servers, and names the commands."""
    if name == "rollouts":
        import ray  # noqa: F401  # it derives classes from Popen, which is replaced here
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
    if name == "receipts":
        pytest.importorskip("megatron.core")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    asyncio.run(run_cells(name, ["--out", str(tmp_path / "out"), *SCRIPTS[name]]))
    assert EXPECTED[name] in capfd.readouterr().out
    assert set(commands) == COMMANDS[name]
