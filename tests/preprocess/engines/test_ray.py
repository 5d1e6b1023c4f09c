"""The Ray engine, with a single cluster for all tests: each worker that Ray starts costs 4 s of CPU time.

Whatever dies, the bytes are those of a quiet run on one machine.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from tests.conftest import cord_row, tree_bytes, write_cord_parquet
from tests.preprocess.command_line import SMALL_IMAGES, environment, finished_shards, start, wait_until
from tests.preprocess.engines.every_engine import EveryEngine, work_of
from vlmdata.errors import ResourceError, SourceError
from vlmdata.preprocess.config import ImageConfig, PreprocessConfig
from vlmdata.preprocess.engines import ray as engine
from vlmdata.preprocess.engines.base import Engine, load_engine
from vlmdata.preprocess.run.dataset import preprocess_dataset
from vlmdata.preprocess.shards.counters import Counters
from vlmdata.preprocess.shards.fingerprints import fingerprints
from vlmdata.preprocess.shards.job import ShardJob
from vlmdata.preprocess.sources.open import open_source
from vlmdata.storage import open_store
from vlmdata.verify.dataset import verify_dataset

#: Commands start again and again, each with the libraries of its workers: minutes on a busy machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

ROWS, ROWS_PER_SHARD, SHARDS = 48, 2, 24
CONFIG = PreprocessConfig(image=ImageConfig(1024, 65_536), rows_per_shard=ROWS_PER_SHARD)
SMALL_STORE = 80 * 2**20
#: For things that take seconds on an idle machine.
PATIENCE = 240
#: Seconds between two looks at all processes of the machine, each of which costs some.
LOOK = 0.2

#: The rows of the last shards wait for a file, so that a run cannot end before a test wants it to.
_RECIPE = """
import os, time
from vlmdata.preprocess.recipes.cord_v2 import CordV2

class Slow(CordV2):
    def __call__(self, row):
        time.sleep(0.15)
        while row.number >= 44 and not os.path.exists(RELEASED):
            time.sleep(0.02)
        return super().__call__(row)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two raylets with a CPU each, of which the first test kills one."""
    node = {"num_cpus": 1, "object_store_memory": SMALL_STORE}
    unused = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
    made = Cluster(initialize_head=True, head_node_args=node | unused)
    made.add_node(**node)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture(scope="module")
def connected(cluster: Cluster) -> Cluster:
    """The cluster, with this process as a driver. Its workers serve all tests that do not end them."""
    ray.init(cluster.address, log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)
    return cluster


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows, a bad one among them, and beside them a recipe in a file."""
    rows = [cord_row(n, width=64, height=64) for n in range(ROWS)]
    rows[7]["ground_truth"] = "{"
    folder = tmp_path_factory.mktemp("ray")
    (folder / "slow_receipts.py").write_text(f"RELEASED = {str(folder / 'released')!r}\n{_RECIPE}")
    return write_cord_parquet(folder / "source" / "train.parquet", rows)


def recipe_of(source: Path) -> str:
    return f"{source.parents[1] / 'slow_receipts.py'}:Slow"


def begin(source: Path, out: Path, cluster: Cluster, workers: int) -> subprocess.Popen[str]:
    options = ("--rows-per-shard", ROWS_PER_SHARD, "--max-reject-rate", 1, "--recipe", recipe_of(source))
    where = ("--engine", "ray", "--ray-address", cluster.address, "-j", workers)
    # Relative to a folder that workers do not start in, and from which the recipe could not be imported.
    place, folder = out.name, out.parent
    return start("preprocess", source, "--out", place, *options, *SMALL_IMAGES, *where, env=environment(), cwd=folder)


def tasks_of(out: Path) -> list[psutil.Process]:
    """Processes at work on a shard: Ray calls them after their task, as its dashboard does."""
    found = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if line.startswith("ray::shard-") and f" of {out.name}" in line:
            found.append(process)
    return found


def is_pending(pid: int, number: signal.Signals) -> bool:
    """Whether a process has not taken a signal yet."""
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = re.findall(r"^ShdPnd:\s*(\w+)$", status, re.MULTILINE)
    return bool(int(mask, 16) >> (number - 1) & 1)


def kill_a_task(out: Path) -> bool:
    """Whether there was one."""
    for process in tasks_of(out):
        with suppress(psutil.NoSuchProcess):
            process.kill()
            return True
    return False


def until_made(process: subprocess.Popen[str], out: Path, shards: int) -> None:
    """Waits for so many shards, unless the command ends before."""
    assert wait_until(lambda: finished_shards(out) >= shards or process.poll() is not None, PATIENCE)
    assert process.poll() is None, process.communicate()[1]


def test_workers_a_raylet_and_drivers_may_die(
    cluster: Cluster, source: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    out = tmp_path / "made-by-two-nodes"

    process = begin(source, out, cluster, 1)
    until_made(process, out, 2)
    assert wait_until(lambda: tasks_of(out), PATIENCE, LOOK)  # named after their shards
    for _ in range(2):  # the second one comes while the tasks are still at work, and not when Ray ends at the exit
        os.killpg(process.pid, signal.SIGINT)
        assert wait_until(lambda: not is_pending(process.pid, signal.SIGINT), PATIENCE, 0.001)
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, stderr
    assert stdout == ""
    assert "interrupted; finished work is kept" in stderr
    assert "Traceback" not in stderr
    assert wait_until(lambda: not tasks_of(out), PATIENCE, LOOK)
    assert not list(out.glob("**/*.tmp"))

    process = begin(source, out, cluster, 1)
    until_made(process, out, finished_shards(out) + 3)
    process.kill()
    process.communicate()
    assert wait_until(lambda: not tasks_of(out), PATIENCE, LOOK), "tasks outlive their driver"

    process = begin(source, out, cluster, 2)
    until_made(process, out, finished_shards(out) + 1)
    assert wait_until(lambda: kill_a_task(out), PATIENCE, LOOK)
    until_made(process, out, finished_shards(out) + 1)
    cluster.remove_node(cluster.worker_nodes.copy().pop(), allow_graceful=False)
    (source.parents[1] / "released").touch()
    _, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, stderr
    assert "already made" in stderr

    quiet = tmp_path_factory.mktemp("quiet") / "out"
    config = dataclasses.replace(CONFIG, recipe=recipe_of(source))
    preprocess_dataset(open_source(str(source)), quiet, config)
    assert tree_bytes(out) == tree_bytes(quiet)
    assert verify_dataset(out).faults == []


class TestEveryEngine(EveryEngine):
    """The tests of every engine, with this one."""

    @pytest.fixture
    def engine(self, connected: Cluster) -> Engine:
        return load_engine("ray")


def test_a_target_that_fills_up_ends_the_run_clearly_and_resumably(
    connected: Cluster, source: Path, small_disk: Callable[..., Path]
) -> None:
    out = small_disk(800) / "out"
    opened = open_source(str(source))
    with pytest.raises(ResourceError, match=r"shard \d+ \(rows .*failed: No space left.*Finished shards are kept"):
        preprocess_dataset(opened, out, CONFIG, workers=2, engine=load_engine("ray"))
    assert not list(out.glob("**/*.tmp"))
    small_disk(20_000)
    result = preprocess_dataset(opened, out, CONFIG, workers=2, engine=load_engine("ray"))
    assert result.kept >= 1
    assert verify_dataset(out).faults == []


def test_a_target_that_became_read_only_ends_the_run_clearly(
    connected: Cluster, source: Path, small_disk: Callable[..., Path]
) -> None:
    disk = small_disk(800)
    work = work_of(source, disk / "out", CONFIG)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    jobs = [ShardJob(0, 0, 2), ShardJob(1, 2, 4)]
    with pytest.raises(ResourceError, match=r"shard \d \(rows .*failed: Read-only file system.*fix permissions"):
        list(load_engine("ray").run(work, jobs, 2, Counters(2)))
    assert not list(disk.glob("**/*.tmp"))


def test_a_run_that_is_left_ends_its_tasks_and_keeps_the_connection(
    connected: Cluster, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = Path("left-early")
    (tmp_path / "slower.py").write_text(f"RELEASED = {str(tmp_path / 'never')!r}\n{_RECIPE.replace('0.15', '1')}")
    config = dataclasses.replace(CONFIG, recipe=f"{tmp_path}/slower.py:Slow")
    work = dataclasses.replace(work_of(source, out, CONFIG), config=config)
    jobs = [ShardJob(0, 0, 2), *(ShardJob(n, 2 * n, 2 * n + 40) for n in range(1, 4))]  # 40 s each, but for the first
    with closing(load_engine("ray").run(work, jobs, 2, Counters(4))) as records:
        assert next(records).info.name == "shard-000000.tar"
        assert wait_until(lambda: tasks_of(out), PATIENCE, LOOK)
    assert ray.is_initialized()
    assert wait_until(lambda: not tasks_of(out), PATIENCE, LOOK)
    assert [path.name for path in out.glob("shard-*")] == ["shard-000000.tar"]


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)


def test_an_interrupt_waits_for_calls_of_ray() -> None:
    with engine._Interrupts() as interrupts:
        press_ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
        interrupts._seen = False
    with pytest.raises(KeyboardInterrupt), engine._Interrupts():
        press_ctrl_c()  # after the last check
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


_ENDS_SLOWLY = """
import atexit, os, signal

def shutdown():
    os.kill(os.getpid(), signal.SIGINT)
    print("shut down", flush=True)

import ray
atexit.register(shutdown)  # as Ray registers its own
from vlmdata.preprocess.engines.base import load_engine
load_engine("ray")
load_engine("ray")
raise SystemExit(130)
"""


def test_an_interrupt_while_ray_shuts_down_at_the_exit_shows_no_traceback() -> None:
    ended = subprocess.run([sys.executable, "-c", _ENDS_SLOWLY], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "shut down\n", "")


def test_a_shard_that_kills_its_workers_ends_the_run(
    connected: Cluster, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_MAX_DEATHS", 2)
    monkeypatch.setattr(engine, "_make_in_task", _die)
    work = work_of(source, tmp_path, CONFIG)
    with pytest.raises(ResourceError, match=r"2 workers were lost in succession over shard 3 \(rows 0 to 1\)"):
        list(load_engine("ray").run(work, [ShardJob(3, 0, 2)], 2, Counters(4)))


def _die(*_: Any) -> None:
    os._exit(1)


def test_a_node_with_other_versions_is_refused(source: Path, tmp_path: Path) -> None:
    work = work_of(source, tmp_path, CONFIG)
    there = fingerprints(CONFIG, work.tokenizer)
    engine._require_equal_versions(engine._TaskInput("key", work, there, None, "/"), "10.0.0.7")
    there["libraries"] = {**there["libraries"], "pillow": "1.0"}
    with pytest.raises(SourceError, match=r'node 10\.0\.0\.7 has other versions.*libraries\.pillow: "1\.0" there'):
        engine._require_equal_versions(engine._TaskInput("key", work, there, None, "/"), "10.0.0.7")


def test_a_shard_that_does_not_appear_here_is_reported(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_SECONDS_TO_SHOW", 0.0)
    preprocess_dataset(open_source(str(source)), tmp_path / "there", dataclasses.replace(CONFIG, rows_per_shard=ROWS))
    manifest = verify_dataset(tmp_path / "there").manifest
    here = open_store(tmp_path / "here")
    record: Any = type("Record", (), {"info": manifest.shards[0]})
    engine._require_visible(open_store(tmp_path / "there"), record, "10.0.0.7")
    with pytest.raises(ResourceError, match=r"made on node 10\.0\.0\.7, but does not appear on this machine"):
        engine._require_visible(here, record, "10.0.0.7")


def test_what_is_shipped_of_the_users_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_recipes").mkdir()
    (tmp_path / "own_recipes" / "__init__.py").touch()
    (tmp_path / "own_recipe.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_codec.py").write_text("from tests.media.shuffled_zlib import CODEC\n")
    recipe, recipes, codec = (str(tmp_path / name) for name in ("own_recipe.py", "own_recipes", "own_codec.py"))
    for name, shipped in (
        ("cord_v2", []),
        ("vlmdata.preprocess.recipes.text:Text", []),
        ("json:loads", []),
        ("own_recipe:Mine", [recipe]),
        ("own_recipes.deep:Mine", [recipes]),
        ("own_recipe.py:Mine", [recipe]),
    ):
        assert engine._shipped_modules(dataclasses.replace(CONFIG, recipe=name)) == shipped
    config = dataclasses.replace(CONFIG, recipe="sub/own_recipe.py:Mine", pixels="own_codec.py:CODEC")
    assert engine._shipped_modules(config)[1:] == [codec]
    sent = engine._on_workers(config)
    assert (sent.recipe, sent.pixels, sent.family) == ("own_recipe:Mine", "own_codec:CODEC", "qwen3_5")


def test_an_address_without_a_cluster_is_reported(tmp_path: Path) -> None:
    shutil.rmtree(tmp_path)
    wrong = r"--engine-option address=auto: engine local has no option address \(--engine ray has it\)"
    with pytest.raises(SourceError, match=wrong):
        load_engine("local", {"address": "auto"})
