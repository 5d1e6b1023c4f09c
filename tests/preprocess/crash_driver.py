"""Kills a run at every step it takes on disk. A program of its own, started by ``test_crash_safety.py``.

It forks a process for every run that dies, so that hundreds of runs take seconds. In it, the audit hook of the
interpreter counts opens for writing, renames, removals and new folders below the output folder, and the process kills
itself just before the step of the given number.

Usage: ``crash_driver.py FOLDER SOURCE``.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import vlmdata.preprocess.run.dataset
import vlmdata.preprocess.shards.fingerprints
import vlmdata.preprocess.shards.job
from tests.conftest import tree_bytes
from vlmdata.preprocess.config import ImageConfig, PreprocessConfig
from vlmdata.preprocess.sources.open import open_source

_EVENTS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir"}


def in_child(work: Callable[[], Any]) -> int:
    """Runs ``work`` in a forked process; gives its exit status, negative for a signal."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die_at(step: int, folder: Path) -> None:
    """Arms this process: it kills itself before its ``step``-th step (from 0) below ``folder``."""
    left, below = step, str(folder)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        changes = event in _EVENTS or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR))
        if changes and str(arguments[0]).startswith(below):
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    sys.addaudithook(hook)


def die_at_each_step(run: Callable[[], object], out: Path, whole: dict[str, bytes], soon: int) -> tuple[int, int]:
    """Runs once for every step at which a run can die, and again to the end, whose result must be the whole one.

    Args:
        run: Makes or continues a folder.
        out: The folder.
        whole: The files of a run without interruption.
        soon: A run that continues may die as well, at a step below this.

    Returns:
        The number of steps, and of deaths.
    """

    def doomed(step: int) -> Callable[[], None]:
        def work() -> None:
            die_at(step, out)
            run()

        return work

    deaths = step = 0
    while True:
        shutil.rmtree(out)
        code = in_child(doomed(step))
        if code == 0:
            return step, deaths
        assert code == -signal.SIGKILL, code
        deaths += 1
        if step % 6 == 0:
            deaths += in_child(doomed(step % soon)) == -signal.SIGKILL
        run()  # continues; in this process, where it takes half as long as in one that is forked
        found = tree_bytes(out)
        different = sorted(name for name in {*found, *whole} if found.get(name) != whole.get(name))
        assert not different, f"killed at step {step}, the result differs in {different}"
        step += 1


def main(out: Path, spec: str) -> None:
    """Makes the dataset once undisturbed, then once for every step at which it can die."""
    config = PreprocessConfig(image=ImageConfig(1024, 65_536), rows_per_shard=2)
    source = open_source(spec)
    # Loaded and looked up once, for all the runs to come.
    load = cache(vlmdata.preprocess.run.making.load_tokenizer)
    vlmdata.preprocess.run.making.load_tokenizer = vlmdata.preprocess.shards.job.load_tokenizer = load
    vlmdata.preprocess.shards.fingerprints.version = cache(vlmdata.preprocess.shards.fingerprints.version)

    def run() -> None:
        vlmdata.preprocess.run.dataset.preprocess_dataset(source, out, config)

    run()
    vlmdata.preprocess.run.making.require_usable = lambda tokenizer, config: (
        None
    )  # just tried; it takes as long as a shard
    print(*die_at_each_step(run, out, tree_bytes(out), soon=11))


if __name__ == "__main__":
    main(Path(sys.argv[1]) / "out", sys.argv[2])
