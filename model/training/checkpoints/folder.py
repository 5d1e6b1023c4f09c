"""The folder of a run's checkpoints: which are complete, how one is removed, and what killed runs left there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from vlmdata.model.weights.places import checkpoints_in

#: Patterns of folders that a killed run leaves: checkpoints half written, and half removed.
_LEFTOVERS = (".step-*.tmp", ".step-*.removed")


def newest_in(folder: Path) -> Path | None:
    """Returns the newest complete checkpoint; None if there is none."""
    return next(reversed(checkpoints_in(folder)), None)


def step_of(checkpoint: Path) -> int:
    """Returns the step of a checkpoint."""
    return int(checkpoint.name.removeprefix("step-"))


def put_aside(checkpoint: Path) -> Path:
    """Renames a checkpoint to a name that is none, so that it never counts as complete while it is removed.

    Raises:
        OSError: If the folder cannot be changed.
    """
    aside = checkpoint.with_name(f".{checkpoint.name}.removed")
    if aside.exists():  # of a run that was killed in here
        shutil.rmtree(aside)
    os.rename(checkpoint, aside)
    return aside


def remove(checkpoint: Path) -> None:
    """Removes a checkpoint. If the process is killed meanwhile, :func:`remove_leftovers` does the rest.

    Raises:
        OSError: If the folder cannot be changed.
    """
    shutil.rmtree(put_aside(checkpoint))


def remove_leftovers(folder: Path) -> None:
    """Removes what runs left that were killed while they saved or removed a checkpoint."""
    for pattern in _LEFTOVERS:
        for leftover in folder.glob(pattern):
            shutil.rmtree(leftover, ignore_errors=True)
