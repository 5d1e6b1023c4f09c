"""Folders of a conversion: the checkpoint to read, and where the output is written first. Needs no torch."""

from __future__ import annotations

import re
from pathlib import Path

#: Name of the temporary folder, or the end of its name.
TEMPORARY = ".vlmdata-convert"
_STEP = re.compile(r"step-\d{8}")


def is_distributed(folder: Path) -> bool:
    """Returns whether a folder holds a distributed checkpoint, whose ``.metadata`` is a pickle: reading it runs code.

    A folder with safetensors never does, whatever else is in it, so that files of others are read without running any.
    """
    return (folder / ".metadata").exists() and not any(folder.glob("*.safetensors"))


def checkpoints_in(folder: Path) -> list[Path]:
    """Lists complete checkpoints of a run, oldest first."""
    return sorted(path for path in folder.glob("step-*") if _STEP.fullmatch(path.name))


def newest_checkpoint_in(folder: Path) -> Path | None:
    """Returns the newest complete checkpoint of a run, given its folder or the one of its checkpoints.

    None if the folder holds weights itself, or no checkpoint.
    """
    if (folder / ".metadata").exists() or any(folder.glob("*.safetensors")):
        return None
    found = [path for place in (folder, folder / "checkpoints") for path in checkpoints_in(place)]
    return max((path for path in found if is_distributed(path)), key=lambda path: path.name, default=None)


def temporary_of(out: Path) -> Path:
    """Returns the temporary folder of an output folder: beside it, or in it if it exists."""
    return out / TEMPORARY if out.is_dir() else out.with_name(f".{out.name}{TEMPORARY}")
