"""Ctrl-C and SIGTERM, however they come: the step is finished and saved, all ranks end, and the run can go on."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("megatron.core")

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async

import vlmdata.model.training.loop
import vlmdata.model.training.step
import vlmdata.model.weights.store
from tests.forked import MODELS, Forked
from tests.model.training.conftest import ROOT, command, environment, steps_of
from tests.model.training.ranks import PATIENCE, Ranks, arguments_of, until_logged
from vlmdata.model.training.checkpoints.write_results import start_write_results
from vlmdata.model.training.processes.interruption import Interruption

pytestmark = pytest.mark.slow

EXACT = ("loss", "grad_norm", "lr", "targets", "tokens", "images", "patches", "samples", "epoch", "mtp_loss")
SMALL = {"data__global_batch": 2}


def exact(out: Path) -> list[dict[str, Any]]:
    return [{name: line[name] for name in EXACT} for line in steps_of(out)]


@pytest.fixture
def signal_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Has SIGTERM come to this process when its batch of this number, from 1, is asked for."""
    endless = vlmdata.model.training.loop.endless

    def at(number: int) -> None:
        def batches(loader: Any) -> Iterator[Any]:
            for count, batch in enumerate(endless(loader), 1):
                if count == number:
                    os.kill(os.getpid(), signal.SIGTERM)
                yield batch

        monkeypatch.setattr(vlmdata.model.training.loop, "endless", batches)

    return at


def start_and_wait(answers: Connection) -> None:
    """Starts the process behind the queue of results, and tells which it is."""
    start_write_results()
    (child,) = (each for each in psutil.Process().children() if "resource_tracker" not in " ".join(each.cmdline()))
    queue = filesystem_async._results_queue
    queue.put("works")
    answers.send((child.pid, queue.get()))
    signal.pause()


def test_the_queue_of_results_ends_with_a_trainer_that_is_killed() -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.model.preloaded"])
    here, there = context.Pipe()
    trainer = context.Process(target=start_and_wait, args=(there,))
    trainer.start()
    try:
        assert here.poll(PATIENCE)
        number, answer = here.recv()
        assert answer == "works"
        of_queue = psutil.Process(number)
        assert not [each.path for each in of_queue.memory_maps() if "libtorch" in each.path], "it takes 20 MB, not 400"
    finally:
        trainer.kill()  # pytest would wait for it at its end
    of_queue.wait(60)  # raises if it has not ended


def test_the_second_signal_says_what_it_does(capfd: pytest.CaptureFixture[str]) -> None:
    interruption = Interruption()
    interruption(signal.SIGINT, None)
    assert interruption.requested()
    with pytest.raises(KeyboardInterrupt):
        interruption(signal.SIGINT, None)
    assert capfd.readouterr().err == "stopped at once, without saving\n"


class TestInTheProcess:
    def test_a_signal_in_a_step_stops_after_that_step(
        self,
        run: Callable[..., Any],
        signal_at: Callable[[int], None],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        signal_at(3)
        outcome = run(**SMALL)
        assert (outcome.steps, outcome.interrupted_by) == (2, signal.SIGTERM)
        checkpoint = tmp_path / "run" / "checkpoints" / "step-00000002"
        assert checkpoint.is_dir()
        said = capsys.readouterr().out
        assert "interrupted: step 2 is saved" in said
        assert said.rstrip().endswith(f"vlmdata train --config {checkpoint / 'config.toml'} --resume")

    @pytest.mark.parametrize(
        ("called", "command"),
        [
            ("/my code/train.py", "python '/my code/train.py'"),
            ("/env/site-packages/vlmdata/train.py", "vlmdata train"),
        ],
    )
    def test_the_next_command_names_the_script_as_the_user_did(
        self,
        called: str,
        command: str,
        run: Callable[..., Any],
        signal_at: Callable[[int], None],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(sys, "argv", [called])
        signal_at(3)
        run(**SMALL)
        assert f"continue with:\n  {command} --config " in capsys.readouterr().out

    def test_a_signal_in_the_last_step_does_not_interrupt(
        self, run: Callable[..., Any], signal_at: Callable[[int], None], capsys: pytest.CaptureFixture[str]
    ) -> None:
        signal_at(4)
        outcome = run(run__steps=2, **SMALL)
        assert (outcome.steps, outcome.interrupted_by) == (2, None)
        said = capsys.readouterr().out
        assert "done: step 2 is saved" in said
        assert "interrupted" not in said

    def test_the_second_signal_ends_at_once(self) -> None:
        interruption = Interruption()
        before = signal.getsignal(signal.SIGTERM)
        with interruption.watched():
            os.kill(os.getpid(), signal.SIGTERM)
            assert interruption.requested()
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGTERM) is before


def test_ctrl_c_to_the_whole_process_group_saves_and_resuming_is_exact(
    run: Callable[..., Any], chats: Path, tmp_path: Path
) -> None:
    """As a terminal sends it: to the loader's workers too, of which the step has more to ask."""
    out = tmp_path / "run"
    options = ("--set", "data.workers=2", "--set", "data.global_batch=2")
    ranks = Ranks(arguments_of(chats, out, *options, steps=200), tmp_path / "said")
    until_logged(out)
    (pid,) = (process.pid for process in ranks.processes)
    assert pid is not None
    children = psutil.Process(pid).children(recursive=True)
    workers = [child for child in children if os.getpgid(child.pid) != pid]
    os.killpg(pid, signal.SIGINT)
    assert ranks.wait() == [130]
    assert len(workers) == 2
    assert not psutil.wait_procs(children, timeout=60)[1]
    assert "interrupted: step" in ranks.said(0)
    assert "Traceback" not in ranks.said(0)
    end = steps_of(out)[-1]["step"] + 1
    run(resume=True, run__steps=end, **SMALL)
    run("whole", run__steps=end, **SMALL)
    assert exact(out) == exact(tmp_path / "whole")


def writers_that_wait(event: Path, rank: int) -> None:
    """Has what writes a checkpoint, in several files, wait until a file exists."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    write = FileSystemWriterAsync.write_preloaded_data_multithread

    def afterwards(*arguments: Any) -> None:
        while not event.exists():
            time.sleep(0.02)
        write(*arguments)

    FileSystemWriterAsync.write_preloaded_data_multithread = staticmethod(afterwards)
    vlmdata.model.weights.store.BYTES_PER_WRITER = 1_000_000


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_process_group_spares_what_writes_a_checkpoint(
    one_process: None, chats: Path, tmp_path: Path, number: signal.Signals
) -> None:
    out = tmp_path / "run"
    options = ("--set", "run.async_save=true", "--set", "run.save_every=1")
    signalled = tmp_path / "signalled"
    prepare = partial(writers_that_wait, signalled)
    ranks = Ranks(arguments_of(chats, out, *options, steps=200), tmp_path / "said", prepare=prepare)
    until_logged(out, steps=2)  # while the checkpoint of the first is being written
    (pid,) = (process.pid for process in ranks.processes)
    assert pid is not None
    children = psutil.Process(pid).children(recursive=True)
    assert children
    os.killpg(pid, number)
    signalled.touch()
    assert ranks.wait() == [128 + number], ranks.said(0)
    said = ranks.said(0)
    saved = steps_of(out)[-1]["step"]
    assert f"interrupted: step {saved} is saved" in said
    assert "writing the last checkpoint" in said
    assert "/s\n" in said.partition("written in ")[2]  # the throughput
    assert not psutil.wait_procs(children, timeout=60)[1]
    checkpoint = out / "checkpoints" / f"step-{saved:08d}"
    assert len(list(checkpoint.glob("*.distcp"))) == vlmdata.model.weights.store.WRITERS
    tensors = dist_checkpointing.load_plain_tensors(str(checkpoint)).values()
    assert all(each.isfinite().all() for each in tensors if isinstance(each, torch.Tensor) and each.is_floating_point())
    assert sum(isinstance(each, torch.Tensor) for each in tensors) > 200, "weights and two moments of each"


def rank_1_has_most_memory(rank: int) -> None:
    vlmdata.model.training.step.device_memory = lambda device: ((1 + rank) * 2**30, rank)


def test_under_srun_a_signal_to_one_rank_stops_all(chats: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = arguments_of(chats, out, "--set", "data.global_batch=2", steps=200)
    ranks = Ranks(arguments, tmp_path / "said", 2, slurm=True, prepare=rank_1_has_most_memory)
    until_logged(out)
    os.kill(ranks.processes[1].pid or 0, signal.SIGTERM)
    assert ranks.wait() == [143, 143]
    assert "2 processes: dp 2" in ranks.said(0)
    assert "interrupted: step" in ranks.said(0)
    assert ranks.said(1) == ""
    assert {line["memory_gib"] for line in steps_of(out)} == {2.0}  # of the rank with the most


def test_sigterm_to_torchrun_saves_and_ends_all(chats: Path, tmp_path: Path, run: Callable[..., Any]) -> None:
    out = tmp_path / "run"
    line = command(chats, out, "--set", "data.workers=1", "--set", "data.global_batch=2", processes=2, steps=200)
    module = line.index("-m") + 1
    process = Forked(
        f"{line[module]}:main",
        line[module:],
        server=MODELS,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        cwd=ROOT,
    )
    until_logged(out)
    children = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert not psutil.wait_procs(children, timeout=60)[1]
    saved = steps_of(out)[-1]["step"]
    assert saved < 200
    assert f"interrupted: step {saved} is saved" in stdout
    checkpoint = out / "checkpoints" / f"step-{saved:08d}" / "config.toml"
    launcher = "torchrun --nproc-per-node 2 --master-addr 127.0.0.1"
    assert f"{launcher} {ROOT / 'train.py'} --config {checkpoint} --resume" in stdout
    # torchrun itself always ends like this; our ranks add nothing to it.
    assert process.returncode == 1
    assert "train.py" not in stderr
    assert stderr.count("Traceback") == 1
    assert "SignalException" in stderr
    run(resume=True, data__global_batch=2, run__steps=saved + 1, optimizer__decay_steps=12)
    assert steps_of(out)[-1]["step"] == saved + 1


class TestTheSlurmScript:
    """The script itself, with a recording python in place of the trainer."""

    @pytest.fixture
    def start(self, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
        tools = tmp_path / "bin"
        tools.mkdir()

        def tool(name: str, text: str) -> None:
            (tools / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
            (tools / name).chmod((tools / name).stat().st_mode | stat.S_IXUSR)

        log = shlex.quote(str(tmp_path / "log"))
        tool("scontrol", f'[[ $1 == show ]] && printf "node7\\nnode8\\n" || echo "scontrol $@" >>{log}')
        # srun's own options, then the program, once a task; the highest exit code is its own.
        tool(
            "srun",
            f'echo "srun $@" >>{log}; while [[ $1 == --* ]]; do shift; done; code=0\n'
            'for task in 0 1; do SLURM_PROCID=$task "$@" & pids[$task]=$!; done\n'
            'for pid in "${pids[@]}"; do wait $pid || { c=$?; ((c > code)) && code=$c; }; done; exit $code',
        )
        tool(
            "vlmdata",
            f'echo "task $SLURM_PROCID at $MASTER_ADDR:$MASTER_PORT: $@" >>{log}\n'
            'exit "$((SLURM_PROCID == 1 ? CODE : 0))"',
        )

        def run(code: int, *arguments: str) -> subprocess.CompletedProcess[str]:
            slurm = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "41", "CODE": str(code)}
            variables = {name: value for name, value in os.environ.items() if name != "MASTER_PORT"}
            return subprocess.run(
                ["bash", str(ROOT / "docs/launch/slurm.sh"), *arguments],
                env=variables | slurm | {"PATH": f"{tools}:{os.environ['PATH']}"},
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=False,
            )

        return run

    def test_starts_a_task_a_gpu_that_finds_the_first(self, start: Any, tmp_path: Path) -> None:
        assert start(0, "--data", "d", "--out", "o").returncode == 0
        lines = (tmp_path / "log").read_text().splitlines()
        assert lines[0].startswith("srun --kill-on-bad-exit=1")
        assert sorted(lines[1:]) == [f"task {task} at node7:20041: train --data d --out o" for task in (0, 1)]

    def test_requeues_what_was_interrupted_and_then_resumes(self, start: Any, tmp_path: Path) -> None:
        start(143, "--out", "o")
        assert (tmp_path / "log").read_text().splitlines()[-1] == "scontrol requeue 41"
        (tmp_path / "o" / "checkpoints" / "step-00000002").mkdir(parents=True)
        assert start(0, "--out", "o").returncode == 0
        assert (tmp_path / "log").read_text().splitlines()[-1].endswith("train --out o --resume")

    def test_gives_other_failures_on(self, start: Any, tmp_path: Path) -> None:
        assert start(2, "--out", "o").returncode == 2
        assert "requeue" not in (tmp_path / "log").read_text()


def test_srun_without_a_meeting_point_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vlmdata.errors import VlmdataError
    from vlmdata.model.parallel.environment import adopt_slurm_ranks

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"SLURM_NTASKS": "16", "SLURM_PROCID": "3", "SLURM_LOCALID": "3"}.items():
        monkeypatch.setenv(name, value)
    adopt_slurm_ranks()  # a batch script: no step, so it is alone
    assert "RANK" not in os.environ
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    with pytest.raises(VlmdataError, match="srun started 16 processes, but MASTER_ADDR and MASTER_PORT is not set"):
        adopt_slurm_ranks()
    monkeypatch.setenv("RANK", "5")  # torchrun within srun has set what it needs
    adopt_slurm_ranks()
    assert os.environ["RANK"] == "5"
