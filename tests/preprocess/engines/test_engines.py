"""Every engine makes the same bytes, passes errors on and leaves no work behind: built in, and that of the docs."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import tree_bytes
from tests.preprocess.command_line import SMALL_IMAGES, TOKENIZER, Ended
from tests.preprocess.engines.every_engine import CONFIG, EveryEngine, work_of
from tests.preprocess.extend_pages import write_example
from vlmdata.errors import SourceError
from vlmdata.preprocess.engines.base import Engine, ShardWork, load_engine, make_shard, make_shards
from vlmdata.preprocess.engines.local import Local
from vlmdata.preprocess.registries import ENGINES as BUILT_IN
from vlmdata.preprocess.run.dataset import preprocess_dataset
from vlmdata.preprocess.shards.counters import Counters
from vlmdata.preprocess.shards.job import ShardJob, ShardRecord
from vlmdata.preprocess.sources.open import open_source

pytestmark = pytest.mark.slow

#: Ray is in test_ray.py. The engine of docs/extend/engine.md stands here as if it were registered.
ENGINES = [*(name for name in BUILT_IN if name != "ray"), "threads"]


@pytest.fixture
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("engine")
    monkeypatch.syspath_prepend(folder)
    name = write_example("engine.md", folder)
    monkeypatch.setitem(BUILT_IN, "threads", f"{name}:Threads")
    yield load_engine(request.param)
    sys.modules.pop(name, None)


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
class TestEveryEngine(EveryEngine):
    """All that run without a cluster."""


class Halting(Engine):
    """Keeps a rule badly: runs the first job only, or twice, or yields or returns something else."""

    def __init__(self, how: str):
        self._how = how

    def run(
        self, work: ShardWork, jobs: Sequence[ShardJob], workers: int, counters: Counters
    ) -> Generator[ShardRecord]:
        """Some of it."""
        if self._how == "list":
            return []  # type: ignore[return-value]
        return self._some(work, jobs, counters)

    def _some(self, work: ShardWork, jobs: Sequence[ShardJob], counters: Counters) -> Generator[ShardRecord]:
        for _ in range(1 + (self._how == "twice")):
            yield from Local().run(work, jobs[:1], 1, counters)
        if self._how == "none":
            yield None  # type: ignore[misc]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("twice", "yielded shard-000000.tar twice"),
        ("once", "ended without shard-000001.tar"),
        ("none", "yielded a NoneType, not the ShardRecord"),
        ("list", "returned a list, not a generator"),
    ],
)
def test_an_engine_that_does_not_do_its_jobs_is_reported(
    cord_parquet: Path, tmp_path: Path, how: str, words: str
) -> None:
    jobs = [ShardJob(n, n, n + 1) for n in range(2)]
    with pytest.raises(SourceError, match=f"--engine {__name__}:Halting: `run` {words}"):
        list(make_shards(Halting(how), work_of(cord_parquet, tmp_path), jobs, 1, Counters(2)))


class NoCluster(Engine):
    """Does not start."""

    default_workers = 2  # type: ignore[assignment]

    def warm_up(self, workers: int) -> None:
        """Fails."""
        raise RuntimeError("no cluster")


def test_an_engine_whose_workers_are_a_number_is_refused() -> None:
    with pytest.raises(SourceError, match="it has no method `default_workers`, but an int of this name"):
        load_engine(f"{__name__}:NoCluster")


def test_an_engine_that_does_not_start_is_named(cord_parquet: Path, tmp_path: Path) -> None:
    words = r"--engine .*:NoCluster: it failed: RuntimeError: no cluster \(test_engines\.py, line \d+\)"
    with pytest.raises(SourceError, match=words):
        preprocess_dataset(open_source(str(cord_parquet)), tmp_path, CONFIG, engine=NoCluster())


class OwnLocal(Local):
    """Does not start either."""

    def warm_up(self, workers: int) -> None:
        """Fails."""
        raise RuntimeError("no cluster")


def test_one_that_is_local_is_named_by_the_command_too(
    vlmdata: Callable[..., Ended], cord_parquet: Path, tmp_path: Path
) -> None:
    """The command starts it before it opens the source."""
    ended = vlmdata("preprocess", cord_parquet, "--out", tmp_path, *TOKENIZER, "--engine", f"{__name__}:OwnLocal")
    assert (ended.code, "OwnLocal: it failed: RuntimeError: no cluster (" in ended.stderr) == (2, True), ended


class Remote(Engine):
    """A worker that gets pickled bytes and counts nothing."""

    def run(
        self, work: ShardWork, jobs: Sequence[ShardJob], workers: int, counters: Counters
    ) -> Generator[ShardRecord]:
        """Each job from the bytes alone."""
        sent = pickle.dumps(work)
        assert len(sent) < 32_000
        for job in jobs:
            yield make_shard(job, pickle.loads(sent).prepare())


def test_what_a_remote_worker_needs_is_small_and_its_shards_are_counted_when_they_are_finished(
    cord_parquet: Path, tmp_path: Path
) -> None:
    counters, done = Counters(3), np.zeros((3, 4), dtype=np.int64)
    jobs = [ShardJob(n, n * 2, n * 2 + 2) for n in range(3)]
    for number, record in make_shards(Remote(), work_of(cord_parquet, tmp_path), jobs, 1, counters):
        done[number] = (2, 2, record.totals.tokens, record.totals.bytes)
        assert (counters.table()[:, :4] == done).all()


class TestCommand:
    def test_takes_an_engine_by_name(
        self, vlmdata: Callable[..., Ended], cord_parquet: Path, tmp_path: Path, reference: dict[str, bytes]
    ) -> None:
        options: tuple[Any, ...] = ("--rows-per-shard", 6, *SMALL_IMAGES, *TOKENIZER, "--recipe", "cord_v2")
        own = vlmdata("preprocess", cord_parquet, "--out", tmp_path, *options, "--engine", f"{__name__}:Remote")
        assert own.code == 0, own.stderr
        assert {name: data for name, data in tree_bytes(tmp_path).items() if name.endswith(".tar")} == {
            name: data for name, data in reference.items() if name.endswith(".tar")
        }

    def test_lists_the_engines(self, vlmdata: Callable[..., Ended], tmp_path: Path) -> None:
        ended = vlmdata("preprocess", "demo", "--out", tmp_path, "--engine", "spark")
        assert ended.code == 2
        known = ", ".join(BUILT_IN)
        assert (
            f"--engine spark: unknown engine. Known: {known}; or your own as module:attribute or file.py:attribute."
            in ended.stderr
        )


def test_an_engine_of_ones_own_has_options(
    vlmdata: Callable[..., Ended], cord_parquet: Path, tmp_path: Path, reference: dict[str, bytes]
) -> None:
    own = ("--engine", f"{tmp_path / write_example('engine.md', tmp_path, 1)}.py:Named", "--engine-option")
    assert vlmdata("preprocess", *own, "help").stdout.splitlines()[1:] == [
        "  prefix: text, default 'shards'. Start of the threads' names."
    ]
    options: tuple[Any, ...] = ("--rows-per-shard", 6, *SMALL_IMAGES, *TOKENIZER, "--recipe", "cord_v2")
    made = vlmdata("preprocess", cord_parquet, "--out", tmp_path / "out", *options, *own, "prefix=mine")
    assert made.code == 0, made.stderr
    assert tree_bytes(tmp_path / "out")["shard-000000.tar"] == reference["shard-000000.tar"]
    wrong = vlmdata("preprocess", cord_parquet, "--out", tmp_path / "out", *options, *own, "colour=red")
    assert (wrong.code, "--engine-option colour=red: engine " in wrong.stderr) == (2, True)


def test_options_of_engines_are_listed(vlmdata: Callable[..., Ended]) -> None:
    listed = vlmdata("preprocess", "--engine-option", "help").stdout
    assert all(f"Options of engine {name}:" in listed for name in BUILT_IN)
    assert "\n  address: text or none, default 'none'. The cluster, such as" in listed


POOL = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from vlmdata.preprocess.engines.base import Engine, make_shard


def make(work, job):
    return make_shard(job, work.prepare())


class Pool(Engine):
    def run(self, work, jobs, workers, counters):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            for job in jobs:
                yield pool.submit(make, work, job).result()


class Broken(Engine):
    def run(self, work, jobs, workers, counters):
        yield jobs[0].rows
"""


class TestAnEngineOfTheUsers:
    @pytest.fixture
    def run(self, vlmdata: Callable[..., Ended], cord_parquet: Path, tmp_path: Path) -> Callable[[str], Ended]:
        """Runs the command with an engine of ``own_engine.py``."""
        file = tmp_path / "own_engine.py"
        file.write_text(POOL)
        options = (*SMALL_IMAGES, "--recipe", "cord_v2", "--limit", 2, "--out", tmp_path / "out")
        return lambda name: vlmdata("preprocess", cord_parquet, *options, "--engine", f"{file}:{name}")

    def test_whose_functions_cannot_be_sent_says_how_to_give_it(self, run: Callable[[str], Ended]) -> None:
        ended = run("Pool")
        assert ended.code == 2
        assert "--engine own_engine.py:Pool: it failed: " in ended.said
        assert "set PYTHONPATH to the file's folder and give --engine own_engine:Pool." in ended.said
        assert "_engine_" not in ended.said.replace("own_engine", ""), "the module's own name says nothing to the user"

    def test_that_fails_is_named_with_file_and_line(self, run: Callable[[str], Ended]) -> None:
        ended = run("Broken")
        assert ended.code == 2
        assert "--engine own_engine.py:Broken: it failed: AttributeError: 'ShardJob' object has no" in ended.said
        assert "(own_engine.py, line 21). Finished shards are kept." in ended.said
        assert "PYTHONPATH" not in ended.said
