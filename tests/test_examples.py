"""The scripts in ``examples/`` run as they are, and find what they promise: they check it themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {
    "receipts": ["--rows", "16", "--steps", "2"],
    "blend": ["--rows", "16"],
    "transformers_packs": ["--steps", "2"],
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


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    if name == "receipts":
        pytest.importorskip("megatron.core")
    command = [sys.executable, f"examples/{name}.py", "--out", str(tmp_path), *SCRIPTS[name]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert EXPECTED[name] in done.stdout
