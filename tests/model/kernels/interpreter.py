"""Triton's interpreter, which runs kernels on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys


def run_interpreted(module: str, *functions: str) -> None:
    """Calls functions of a module in a process of its own: Triton interprets from the start or not at all."""
    calls = "; ".join(f"here.{each}()" for each in functions)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"import {module} as here; {calls}"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-5000:]
