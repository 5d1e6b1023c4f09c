"""What can be known of FlashAttention 4 without importing it, and its cache folder.

Without the cache, the package compiles its kernels at each start.
"""

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


def flash_attention_4_takes(width: int) -> bool:
    """Whether FlashAttention 4 computes right gradients for heads of a width.

    On Hopper, version 4.0.0b36 gives wrong gradients of queries if the width is not a multiple of 32, without an error:
    its backward kernels pad rows differently (flash-attention's pull request 2896). On Blackwell it does not compile
    kernels for such widths (pull request 2715).
    """
    return width % 32 == 0


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
