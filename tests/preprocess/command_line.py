"""Running the real ``vlmdata`` command in processes of its own, and watching what becomes of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.forked import Forked, completed

SCRIPT = Path(sys.executable).with_name("vlmdata")
COMMAND = [str(SCRIPT)] if SCRIPT.exists() else [sys.executable, "-c", "from vlmdata.cli.main import main; main()"]

TOKENIZER = ("--tokenizer", "embedded")
#: The embedded tokenizer, and fewer pixels than the command's defaults: tests want many rows, not large ones.
SMALL_IMAGES = (*TOKENIZER, "--min-pixels", "1024", "--max-pixels", "65536")


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def said(self) -> str:
        """All it said, the line breaks and frames of a terminal taken out."""
        return re.sub(r"[\s│╭╮╰╯─]+", " ", self.stdout + self.stderr)


def environment(**more: str) -> dict[str, str]:
    """The environment of a command: offline, on a screen of known width."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "120", **more}


def start(*arguments: Any, anew: bool = False, **options: Any) -> subprocess.Popen[str]:
    """Starts the command in a process group of its own, its outputs in pipes unless told otherwise.

    Args:
        arguments: Of the command.
        anew: Whether a new interpreter runs the script, for a test of its start: 8 s of CPU time. Otherwise the
            process is forked from one that has the command's libraries.
        options: Of :class:`subprocess.Popen`.
    """
    options = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "start_new_session": True,
        "env": environment(),
        **options,
    }
    if anew:
        return subprocess.Popen([*COMMAND, *map(str, arguments)], text=True, **options)
    return Forked("vlmdata.cli.main:main", [COMMAND[0], *map(str, arguments)], text=True, **options)


def run(*arguments: Any, timeout: float = 240, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs the command to its end."""
    return completed(start(*arguments, **options), timeout)


def alive(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that still run; a zombie nobody has reaped does not."""
    return [process for process in processes if _runs(process)]


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def server_of(process: subprocess.Popen[Any]) -> list[psutil.Process]:
    """The process below one that workers are forked from: none, or one."""
    try:
        children = psutil.Process(process.pid).children()
    except psutil.NoSuchProcess:
        return []
    return [child for child in children if any("forkserver" in word for word in _arguments(child))]


def workers_of(process: subprocess.Popen[Any]) -> list[psutil.Process]:
    """The worker processes below one."""
    found: list[psutil.Process] = []
    for server in server_of(process):
        with suppress(psutil.NoSuchProcess):
            found += server.children()
    return found


def _arguments(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def wait_until(condition: Callable[[], Any], seconds: float, interval: float = 0.02) -> bool:
    """Waits for a condition; says whether it came true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(interval)
    return bool(condition())


def finished_shards(directory: Path) -> int:
    """Shards of an unfinished run that are whole."""
    return len(list((directory / ".progress").glob("shard-*.json")))
