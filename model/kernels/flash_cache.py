"""Cache folder for FlashAttention 4, which otherwise compiles its kernels for up to a minute at each start."""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import stat
import tempfile
from pathlib import Path

_ENABLED, _FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"


def flash_attention_4_is_installed() -> bool:
    """Checks if the package is installed, without importing it."""
    try:
        importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def keep_compiled() -> Path | None:
    """Enables the compile cache of FlashAttention 4.

    Call it before importing ``flash_attn.cute``, which reads the environment once. By default the package compiles in
    every process. Its cache locks files and fails a step if locking fails, as on some network file systems. Its default
    folder is in /tmp under a predictable name, where another user could place code that the package would load. So this
    function uses a folder on this machine that only this user can write to, after testing that locking works.

    Returns:
        The folder; None if the user has set the cache or no such folder exists.
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
    """True if the path is a real directory, owned by this user and not writable by others."""
    found = folder.lstat()
    others = stat.S_IWGRP | stat.S_IWOTH
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & others
