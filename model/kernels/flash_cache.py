"""A place where FlashAttention 4 keeps what it compiles, which takes it up to a minute at every start otherwise."""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import stat
import tempfile
from pathlib import Path

_ENABLED, _FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"


def flash_attention_4_is_installed() -> bool:
    """Whether the package is there; nothing is imported."""
    try:
        importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def keep_compiled() -> Path | None:
    """Turns its cache on; to be called before ``flash_attn.cute`` is imported, which reads the environment then only.

    Left to itself the package compiles in every process. Its cache locks files and fails a step where they cannot be
    locked, as on some network file systems, and its own default is a folder in /tmp with a name that others could take
    first, to have code of theirs loaded. So: a folder on this machine that is ours alone, and tried.

    Returns:
        The folder; none where the user has decided about the cache, or where there is no such folder.
    """
    if _ENABLED in os.environ:
        return None
    try:
        ours = Path(tempfile.gettempdir()) / f"vlmdata-{os.getuid()}" / "flash-attention"
        folder = Path(os.environ.get(_FOLDER) or ours)
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        if _FOLDER not in os.environ and not (_is_ours(folder.parent) and _is_ours(folder)):
            return None
        with (folder / ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return None
    os.environ[_ENABLED], os.environ[_FOLDER] = "1", str(folder)
    return folder


def _is_ours(folder: Path) -> bool:
    """Whether it is a folder, no link, of this user that nobody else may write to."""
    found = folder.lstat()
    others = stat.S_IWGRP | stat.S_IWOTH
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & others
