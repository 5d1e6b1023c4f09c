"""Logs that a run without a checkpoint left in the folder of a new run."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

#: What a run logs, as patterns in its folder.
_LOGS = ("metrics.jsonl", "tensorboard", "profile", "not-finite-step-*.json")


def move_earlier_logs(out: Path) -> list[str]:
    """Moves the logs of an earlier run into a folder of their own. Returns a line for the user if there were any.

    A new run has no steps in common with them: the earlier one died before its first checkpoint, or its checkpoints
    were moved away.
    """
    steps = out / "metrics.jsonl"
    # A run that ended before its first step left nothing to add to.
    if not (steps.stat().st_size if steps.exists() else (out / "tensorboard").exists()):
        return []
    found = sorted(path for pattern in _LOGS for path in out.glob(pattern))
    aside = next(path for number in count(1) if not (path := out / f"earlier-run-{number}").exists())
    aside.mkdir()
    for path in found:
        os.rename(path, aside / path.name)
    return [f"{out} had logs of an earlier run without a checkpoint: they are now in {aside}"]
