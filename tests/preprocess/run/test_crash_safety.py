"""Whatever dies, and whenever: the same command continues, and the result is byte for byte that of a quiet run."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.conftest import cord_row, tree_bytes, write_cord_parquet
from tests.forked import ROOT, run_forked
from tests.preprocess.command_line import (
    SMALL_IMAGES,
    alive,
    environment,
    finished_shards,
    server_of,
    start,
    wait_until,
    workers_of,
)
from vlmdata.preprocess.config import ImageConfig, PreprocessConfig
from vlmdata.preprocess.run.dataset import preprocess_dataset
from vlmdata.preprocess.sources.open import open_source
from vlmdata.verify.dataset import verify_dataset

pytestmark = pytest.mark.slow

ROWS, ROWS_PER_SHARD, SHARDS = 48, 4, 12
#: What a row takes at least.
SECONDS_PER_ROW = "0.03"
#: At least so many at other moments in every run of the tests: the runs add up.
KILLS, WORKER_KILLS, SERVER_KILLS = 6, 3, 1
#: For what takes ten seconds on an idle machine, and much longer on one with other work.
PATIENCE = 300.0
#: Limits for processes to go. Workers go at once; the server they are forked from finishes its imports first.
WORKER_SECONDS, SERVER_SECONDS = 60.0, 120.0

_RECIPE = """
import os, time
from vlmdata.preprocess.recipes.cord_v2 import CordV2

class Slow(CordV2):
    def __call__(self, row):
        time.sleep(float(os.environ.get("SECONDS_PER_ROW", 0)))
        while row.number >= int(os.environ.get("HELD_FROM", "1000")) and not os.path.exists(os.environ["RELEASED"]):
            time.sleep(0.02)
        return super().__call__(row)
"""


class Job:
    """One command, to be given again and again for the same directory."""

    def __init__(self, source: Path, recipes: Path, out: Path):
        self.out = out
        self._source, self._recipes = source, recipes
        self._released = out.with_name(f"{out.name}-released")
        self._arguments = ["--recipe", "slow_recipe:Slow", "--rows-per-shard", ROWS_PER_SHARD, "--max-reject-rate", 1]

    def start(self, shards: int = SHARDS, nurseries: int = 2) -> subprocess.Popen[str]:
        """Starts the command. Rows of later shards wait until :meth:`release` is called.

        Args:
            shards: How many it makes before.
            nurseries: How many servers of workers need no imports: by default the first, and one that replaces it.
        """
        command = ["preprocess", self._source, "--out", self.out, "-j", 2, *self._arguments, *SMALL_IMAGES]
        held = {"HELD_FROM": str(shards * ROWS_PER_SHARD), "RELEASED": str(self._released)}
        recipe = {"SECONDS_PER_ROW": SECONDS_PER_ROW, "PYTHONPATH": str(self._recipes)}
        return start(*command, env=environment(**recipe, **held), nurseries=nurseries)

    def release(self) -> None:
        self._released.touch()

    def run_quietly(self) -> None:
        """To the end, in this process, without a pause."""
        config = PreprocessConfig(
            recipe="slow_recipe:Slow", image=ImageConfig(1024, 65_536), rows_per_shard=ROWS_PER_SHARD
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(self._recipes)
            preprocess_dataset(open_source(str(self._source)), self.out, config)

    @property
    def finished_shards(self) -> int:
        return SHARDS if (self.out / "manifest.json").exists() else finished_shards(self.out)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for outputs: in memory where that is possible, as waiting for a disk would take minutes."""
    memory = Path("/dev/shm")
    folder = tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else tmp_path_factory.mktemp("place"))
    yield Path(folder)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A source with a bad row here and there, and a folder with a recipe that takes its time."""
    rows = [cord_row(n) for n in range(ROWS)]
    for n in range(7, ROWS, 30):
        rows[n]["ground_truth"] = "{"
    folder = tmp_path_factory.mktemp("crash")
    (folder / "slow_recipe.py").write_text(_RECIPE)
    return write_cord_parquet(folder / "source" / "train.parquet", rows), folder


@pytest.fixture(scope="module")
def undisturbed(inputs: tuple[Path, Path], place: Path) -> dict[str, bytes]:
    """The files of a run that nothing happened to."""
    job = Job(*inputs, place / "undisturbed")
    job.run_quietly()
    assert verify_dataset(job.out).faults == []
    return tree_bytes(job.out)


@pytest.fixture
def job(inputs: tuple[Path, Path], place: Path) -> Iterator[Job]:
    yield Job(*inputs, place / "out")
    shutil.rmtree(place / "out", ignore_errors=True)


def test_sigkills_at_random_moments_after_a_ctrl_c_leave_no_trace_in_the_result(
    job: Job, interrupted_at_work: Interrupted, undisturbed: dict[str, bytes]
) -> None:
    seed = time.time_ns()
    mayhem = Mayhem(job, random.Random(seed))
    while not mayhem.enough:  # once, on any machine seen so far
        shutil.rmtree(job.out, ignore_errors=True)
        shutil.copytree(interrupted_at_work.out, job.out)
        mayhem.kill_parent(while_starting=True)
        mayhem.kill_parent(after=0.5)
        mayhem.finish()
        assert _differences(tree_bytes(job.out), undisturbed) == [], (seed, mayhem.kills)
    assert min(mayhem.moments) < 0.5 <= max(mayhem.moments)
    assert wait_until(lambda: not alive(list(mayhem.seen)), SERVER_SECONDS), "processes are left behind"


class Mayhem:
    """Starts the command and kills its processes at random moments.

    Attributes:
        kills: How often which kind of process was killed.
        moments: Share of the shards that stood at each kill.
        seen: Workers, and servers of workers, that must be gone in the end.
    """

    def __init__(self, job: Job, chance: random.Random):
        self.kills: Counter[str] = Counter()
        self.moments: list[float] = []
        self.seen: set[psutil.Process] = set()
        self._job = job
        self._chance = chance

    @property
    def enough(self) -> bool:
        """Whether enough died, of every kind."""
        kills = self.kills
        return kills.total() >= KILLS and kills["worker"] >= WORKER_KILLS and kills["server"] >= SERVER_KILLS

    def kill_parent(self, *, while_starting: bool = False, after: float = 0.0) -> None:
        """Kills the parent while it starts, or when a share of the shards (and a little more) is made.

        The last shards are held back, so that it cannot end before.
        """
        process = self._job.start(shards=SHARDS - 2)
        if while_starting:
            time.sleep(self._chance.uniform(0.05, 1.0))  # shorter than the start of its workers
        else:
            until = (after + self._chance.uniform(0, 0.05)) * SHARDS
            while not self._kill_workers(process, until):
                process = self._job.start(shards=SHARDS - 2)
        workers = workers_of(process)
        self.seen.update(workers, server_of(process))
        self._kill("parent", psutil.Process(process.pid))
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert wait_until(lambda: not alive(workers), WORKER_SECONDS), "workers outlived their parent"

    def finish(self) -> None:
        """Lets the command end. It replaces workers killed on the way without a word."""
        made = self._job.finished_shards
        process = self._job.start()
        while not self._kill_workers(process, until=SHARDS):
            made = self._job.finished_shards
            process = self._job.start()
        stdout, stderr = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, stderr
        assert "Traceback" not in stderr
        assert f"{made} already made" in stderr
        assert "samples" in stdout

    def _kill_workers(self, process: subprocess.Popen[str], until: float) -> bool:
        """Kills a worker, the first time the server they come from, until enough shards are made.

        Returns:
            False if the command gave up first, as it should when one worker after the other dies over one shard.
        """
        while process.poll() is None and (now := self._job.finished_shards) < until:
            workers = workers_of(process)
            if workers:
                self.seen.update(workers)
                kind = "worker" if self.kills["server"] else "server"
                self._kill(kind, self._chance.choice(workers if kind == "worker" else server_of(process)))
                if self._chance.random() < 0.8:  # else the next one may die before anything is made
                    self._wait_for_progress(process, now)
            time.sleep(self._chance.uniform(0.02, 0.3))
        if process.poll() in (None, 0):
            return True
        _, stderr = process.communicate()
        assert process.returncode == 3, stderr
        assert "5 worker processes died in a row on shard" in stderr
        return False

    def _wait_for_progress(self, process: subprocess.Popen[str], before: int) -> None:
        wait_until(lambda: self._job.finished_shards > before or process.poll() is not None, PATIENCE)

    def _kill(self, kind: str, victim: psutil.Process) -> None:
        self.moments.append(self._job.finished_shards / SHARDS)
        with suppress(psutil.NoSuchProcess):
            victim.kill()
            self.kills[kind] += 1


def _differences(found: dict[str, bytes], expected: dict[str, bytes]) -> list[str]:
    return sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))


@dataclass(frozen=True)
class Interrupted:
    """A command that met Ctrl-C."""

    out: Path
    code: int
    stdout: str
    stderr: str
    workers: list[psutil.Process]
    server: list[psutil.Process]


def _interrupt(job: Job, process: subprocess.Popen[str]) -> Interrupted:
    workers, server = workers_of(process), server_of(process)
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all of them
    stdout, stderr = process.communicate(timeout=PATIENCE)
    return Interrupted(job.out, process.returncode, stdout, stderr, workers, server)


@pytest.fixture(scope="module")
def interrupted_at_work(inputs: tuple[Path, Path], place: Path) -> Interrupted:
    """A command that met Ctrl-C when a few shards were made."""
    job = Job(*inputs, place / "interrupted")
    process = job.start(shards=3)
    assert wait_until(lambda: job.finished_shards == 3, PATIENCE)
    return _interrupt(job, process)


@pytest.fixture
def interrupted_at_start(job: Job) -> Interrupted:
    """A command that met Ctrl-C while the server of workers was still importing."""
    process = job.start(nurseries=0)  # so that its server imports
    assert wait_until(lambda: server_of(process), PATIENCE)
    time.sleep(0.5)
    return _interrupt(job, process)


@pytest.mark.parametrize("moment", ["start", "work"])
def test_ctrl_c_ends_every_process_with_a_clear_word_and_leaves_no_half_file(
    moment: str, request: pytest.FixtureRequest
) -> None:
    interrupted: Interrupted = request.getfixturevalue(f"interrupted_at_{moment}")
    assert interrupted.code == 130, interrupted.stderr
    assert interrupted.stdout == ""
    assert "interrupted; finished work is kept, and the same command continues" in interrupted.stderr
    assert "Traceback" not in interrupted.stderr
    assert "KeyboardInterrupt" not in interrupted.stderr
    assert wait_until(lambda: not alive(interrupted.workers), WORKER_SECONDS)
    assert wait_until(lambda: not alive(interrupted.server), SERVER_SECONDS)
    assert not list(interrupted.out.glob("**/*.tmp"))


def test_dying_at_any_step_on_disk_leaves_no_trace_in_the_result(tmp_path: Path, place: Path) -> None:
    rows = [cord_row(n) for n in range(4)]
    rows[3]["ground_truth"] = "{"
    source = write_cord_parquet(tmp_path / "source" / "train.parquet", rows)
    driver = ROOT / "tests" / "preprocess" / "crash_driver.py"
    done = run_forked(str(driver), place / "steps", source, env=environment())
    assert done.returncode == 0, done.stderr
    steps, deaths = map(int, done.stdout.split())
    assert steps > 40
    assert deaths > steps
