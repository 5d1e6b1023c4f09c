"""Runs of train.py in several processes that share one import of megatron-core, which is what costs."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tests.model.training.conftest import ROOT, command
from tests.ports import free_port

#: Seconds until a run that does not end is a failure.
PATIENCE = 500.0


class Ranks:
    """The processes of one run, each with a process group and output files of its own.

    Args:
        arguments: Of the script.
        folder: Where outputs go.
        world: Processes.
        slurm: Whether ``srun`` seems to have started them, rather than torchrun.
        folders: Where each of them works; by default where the test does.
        prepare: Called with the rank in each of them before the script is run.
        script: What they run, from the root of the repository.
    """

    def __init__(
        self,
        arguments: list[str],
        folder: Path,
        world: int = 1,
        slurm: bool = False,
        folders: Sequence[Path] | None = None,
        prepare: Callable[[int], None] | None = None,
        script: str = "train.py",
    ):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.model.preloaded"])
        port = str(free_port())
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.processes = [
            context.Process(
                target=_rank,
                args=(
                    script,
                    arguments,
                    folder / f"rank-{rank}",
                    _environment(rank, world, port, slurm),
                    folders[rank] if folders else Path.cwd(),
                    partial(prepare, rank) if prepare else None,
                ),
            )
            for rank in range(world)
        ]
        for process in self.processes:
            process.start()

    def wait(self) -> list[int | None]:
        """Waits for all; their exit codes.

        Raises:
            AssertionError: If one does not end, with what all have said.
        """
        deadline = time.monotonic() + PATIENCE
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        self.close()
        assert None not in codes, f"{codes}\n" + "\n".join(self.said(rank) for rank in range(len(codes)))
        return codes

    def close(self) -> None:
        """Ends what is left."""
        for process in self.processes:
            process.kill()
            process.join()

    def said(self, rank: int) -> str:
        """Everything a rank has printed."""
        return (self._folder / f"rank-{rank}").read_text()


def arguments_of(data: Path | str, out: Path, *options: str, steps: int = 6) -> list[str]:
    """The command line without interpreter and script."""
    line = command(data, out, *options, steps=steps)  # type: ignore[arg-type]
    return line[line.index(str(ROOT / "train.py")) + 1 :]


def until_logged(out: Path, steps: int = 1) -> None:
    """Waits for the first steps of a run."""
    log, deadline = out / "metrics.jsonl", time.monotonic() + PATIENCE
    while not log.exists() or log.read_text().count("\n") < steps:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _environment(rank: int, world: int, port: str, slurm: bool) -> dict[str, str]:
    if world == 1:
        return {}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS") if slurm else ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    return (
        meeting
        | dict(zip(names, (str(rank), str(rank), str(world)), strict=True))
        | ({"SLURM_STEP_ID": "0"} if slurm else {})
    )


def _rank(
    script: str,
    arguments: list[str],
    output: Path,
    environment: dict[str, str],
    folder: Path,
    prepare: Callable[[], None] | None,
) -> None:
    os.setsid()
    os.chdir(folder)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"} | environment
    if prepare is not None:
        prepare()
    sys.argv = [script, *arguments]
    sys.path.insert(0, str((ROOT / script).parent))  # as the interpreter does
    runpy.run_path(str(ROOT / script), run_name="__main__")
