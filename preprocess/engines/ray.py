"""The Ray engine: one task per shard, on any node. If a worker or node is lost, its shards are made again elsewhere."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import signal
import sysconfig
import threading
import time
import traceback
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Self
from uuid import uuid4

from vlmdata.errors import ResourceError, SourceError, VlmdataError
from vlmdata.families import REGISTRY as FAMILIES
from vlmdata.format.manifest import differences
from vlmdata.format.schema import shard_name
from vlmdata.machine import available_cores
from vlmdata.media.c_library import keep_memory
from vlmdata.media.codecs import REGISTRY as CODECS
from vlmdata.preprocess.config import PreprocessConfig
from vlmdata.preprocess.engines.base import Engine, ShardWork, make_shard, rows_of
from vlmdata.preprocess.engines.tally import Tally
from vlmdata.preprocess.registries import RECIPES
from vlmdata.preprocess.shards.counters import Counters
from vlmdata.preprocess.shards.fingerprints import fingerprints
from vlmdata.preprocess.shards.job import RowOutcome, ShardContext, ShardJob, ShardRecord
from vlmdata.registry import Registry, is_file
from vlmdata.storage import Store
from vlmdata.workers import WorkerError

#: The run fails when this many workers are lost over the same shard.
_MAX_DEATHS = 5
#: Time between two updates of the counts of unfinished shards.
_SECONDS_BETWEEN_COUNTS = 1.0
#: Time for a file of another machine to appear here: a shared file system may answer from its cache this long.
_SECONDS_TO_SHOW = 60.0
#: For tasks to notice that the run has ended.
_SECONDS_TO_END = 10.0
#: Size of Ray's object store on this machine, the smallest that Ray accepts. Only records of shards pass through it.
_OBJECT_STORE_BYTES = 78_643_200


class Ray(Engine):
    """Runs each shard as a Ray task on one CPU.

    Uses this process's connection to Ray. If there is none, the engine connects.
    """

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Options of the engine."""

        address: Annotated[
            str | None,
            "The cluster, such as 10.0.0.1:6379 or auto. Without it: $RAY_ADDRESS, else Ray starts on this machine.",
        ] = None

    def __init__(self, options: Options):
        """Checks that Ray is installed. Does not connect yet.

        Raises:
            SourceError: If Ray is not installed.
        """
        try:
            import ray
        except ImportError as error:
            raise SourceError(f"--engine ray needs Ray ({error}). Install it: pip install 'vlmdata[ray]'.") from error
        _ignore_interrupts_at_exit()
        self._ray: Any = ray
        self._address = options.address or os.environ.get("RAY_ADDRESS") or "local"
        self._connected_here = False
        self._shipped = False  # whether the user's own code was sent to the workers

    def default_workers(self, config: PreprocessConfig) -> int:
        """Returns the number of CPUs of the cluster, or of this machine if Ray starts here."""
        self._connect(config, available_cores())
        return max(int(self._ray.cluster_resources().get("CPU", 1)), 1)

    def run(
        self, work: ShardWork, jobs: Sequence[ShardJob], workers: int, counters: Counters
    ) -> Generator[ShardRecord]:
        """Makes shards; see :meth:`Engine.run`. At most ``workers`` tasks are in flight."""
        self._connect(work.config, workers)
        sent = dataclasses.replace(work, config=_on_workers(work.config)) if self._shipped else work
        with _Interrupts() as interrupts:
            run = _RayRun(self._ray, work, sent, counters)
            try:
                waiting = iter(jobs)
                while True:
                    while len(run.pending) < workers and (job := next(waiting, None)) is not None:
                        run.submit(job)
                    if not run.pending:
                        break
                    yield from run.wait()
                    interrupts.check()
            finally:
                if not run.end() and self._connected_here:
                    self._ray.shutdown()  # the cluster kills the tasks of a driver that has left
                    self._connected_here = False

    def _connect(self, config: PreprocessConfig, workers: int) -> None:
        """Connects to the cluster, or starts Ray here with this number of CPUs. Does nothing if connected."""
        if self._ray.is_initialized():
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options: dict[str, Any] = {}
        if self._address == "local":
            options = {
                "num_cpus": workers,
                "object_store_memory": _OBJECT_STORE_BYTES,
                "include_dashboard": False,
            }
        shipped = _shipped_modules(config)
        try:
            self._ray.init(
                address=self._address,
                runtime_env={"py_modules": shipped} if shipped else None,
                logging_level="ERROR",
                log_to_driver=False,  # errors come with the records, and stdout is for the summary
                **options,
            )
            self._connected_here, self._shipped = True, bool(shipped)
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            raise ResourceError(
                f"--engine-option address={self._address}: cannot connect: {error}. Check that the cluster runs "
                "(`ray status`)."
            ) from error


class _RayRun:
    """The tasks of one run.

    Attributes:
        pending: The jobs in flight, by the reference to their task's result.
    """

    def __init__(self, ray: Any, work: ShardWork, sent: ShardWork, counters: Counters):
        self.pending: dict[Any, ShardJob] = {}
        self._ray = ray
        self._work = work
        self._counters = counters
        self._deaths: Counter[int] = Counter()
        self._task = ray.remote(num_cpus=1, max_retries=0)(_make_in_task)
        self._tally = ray.remote(num_cpus=0, max_restarts=-1)(Tally).remote()
        self._taken: Any = None
        versions = fingerprints(work.config, work.tokenizer)
        self._arguments = ray.put(_TaskInput(uuid4().hex, sent, versions, self._tally, os.getcwd()))

    def submit(self, job: ShardJob) -> None:
        """Starts the task of a job."""
        name = f"{shard_name(job.number).removesuffix('.tar')} of {self._work.store}"
        self.pending[self._task.options(name=name).remote(self._arguments, job)] = job

    def wait(self) -> Iterator[ShardRecord]:
        """Waits for tasks for up to a second. Yields the records of those that have ended."""
        ended, _ = self._ray.wait(list(self.pending), num_returns=1, timeout=_SECONDS_BETWEEN_COUNTS)
        self._count()
        for task in ended:
            job = self.pending.pop(task)
            record = self._record(task, job)
            if record is None:
                self.submit(job)
            else:
                yield record

    def end(self) -> bool:
        """Asks all tasks to end, and waits. Returns False if some have not ended in time.

        Tasks end by themselves, between two rows. Ray 2.60 aborts the driver if a task ends while it is cancelled.
        """
        if self.pending:
            self._tally.stop.remote()
            _, left = self._ray.wait(list(self.pending), num_returns=len(self.pending), timeout=_SECONDS_TO_END)
            self.pending.clear()
            return not left
        return True

    def _record(self, task: Any, job: ShardJob) -> ShardRecord | None:
        """Returns the record of a shard; None if its worker was lost."""
        errors = self._ray.exceptions
        try:
            node, outcome = self._ray.get(task)
        except (errors.RayTaskError, errors.RuntimeEnvSetupError, errors.TaskUnschedulableError) as error:
            raise WorkerError(f"in a Ray task:\n{error}") from error
        except errors.RayError as error:
            self._deaths[job.number] += 1
            if self._deaths[job.number] < _MAX_DEATHS:
                return None
            raise ResourceError(
                f"{self._work.store}: {_MAX_DEATHS} workers were lost in succession over shard {job.number} "
                f"({rows_of(job, self._work.source)}); the last one: {_first_line(error)}. Out of memory? "
                "Finished shards are kept; use fewer --workers or a lower --max-source-pixels and run the same command "
                "again to continue. With --engine local it names the row and can reject it."
            ) from error
        if isinstance(outcome, Exception):
            raise outcome
        _require_visible(self._work.store, outcome, node)
        return outcome  # type: ignore[no-any-return]

    def _count(self) -> None:
        """Copies the workers' counts of the shards in flight."""
        if self._taken is None:
            self._taken = self._tally.take.remote()
        elif self._ray.wait([self._taken], timeout=0)[0]:
            with contextlib.suppress(self._ray.exceptions.RayError):  # the counts are not worth ending a run
                lines = self._ray.get(self._taken)
                for job in self.pending.values():
                    if job.number in lines:
                        self._counters.table()[job.number] = lines[job.number]
            self._taken = None


def _require_visible(store: Store, record: ShardRecord, node: str) -> None:
    """Checks that a shard made on another node appears on this machine."""
    end = time.monotonic() + _SECONDS_TO_SHOW
    while store.size(record.info.name) != record.info.bytes:
        if time.monotonic() > end:
            raise ResourceError(
                f"{store.path(record.info.name)}: made on node {node}, but does not appear on this machine. --out must "
                "be storage that all nodes share under the same path, or an object store."
            )
        time.sleep(0.5)


@dataclasses.dataclass(frozen=True, eq=False)
class _TaskInput:
    """The argument that all tasks of a run share."""

    key: str  # identifies the run
    work: ShardWork  # data for workers
    fingerprints: Mapping[str, Any]  # those of the driver's code and libraries
    tally: Any  # the actor that receives row counts
    folder: str  # the driver's current folder, to which paths may be relative


#: The context of the last run of this worker, by the run's key.
_context: dict[str, ShardContext] = {}


def _make_in_task(sent: _TaskInput, job: ShardJob) -> tuple[str, ShardRecord | Exception]:
    """Makes a shard in a worker. Returns the node, and the record or the error."""
    import ray

    node = ray.util.get_node_ip_address()
    try:
        reporter = _Reporter(ray, sent.tally)
        reporter.check(timeout=_SECONDS_TO_END)  # a task may wait for a CPU until its run has ended
        if sent.key not in _context:
            _context.clear()
            with contextlib.suppress(OSError):  # not needed if all paths are absolute or URLs
                os.chdir(sent.folder)
            _require_equal_versions(sent, node)
            keep_memory()
            _context[sent.key] = sent.work.prepare()
        return node, make_shard(job, _context[sent.key], reporter)
    except VlmdataError as error:
        return node, error
    except Exception:
        return node, WorkerError(f"in a worker process on node {node}:\n{traceback.format_exc()}")


def _require_equal_versions(sent: _TaskInput, node: str) -> None:
    """Checks that this node makes the same bytes as the driver's machine."""
    here = fingerprints(sent.work.config, sent.work.tokenizer)
    if changed := differences(sent.fingerprints, here):
        raise SourceError(
            f"node {node} has other versions than the machine that started the run, so its shards would differ "
            f"(driver there, node now): {'; '.join(changed)}. Install the same versions on all nodes."
        )


class _RunEndedError(Exception):
    """The run has ended, so nobody waits for this shard."""


class _Reporter:
    """Sends the counts of a shard to the run, at most once per second, and checks whether the run has ended."""

    def __init__(self, ray: Any, tally: Any):
        self._ray = ray
        self._tally = tally
        self._counters = Counters(1)
        self._sent = time.monotonic()
        self._stopped = tally.stopped.remote()

    def start(self, shard: int) -> None:
        """Resets the counts for a shard."""
        self._counters.start(0)

    def add(self, shard: int, outcome: RowOutcome) -> None:
        """Counts a row.

        Raises:
            _RunEndedError: If the run has ended.
        """
        self._counters.add(0, outcome)
        if time.monotonic() - self._sent >= _SECONDS_BETWEEN_COUNTS:
            self._sent = time.monotonic()
            self.check(timeout=0)
            self._stopped = self._tally.put.remote(shard, self._counters.table()[0].copy())

    def check(self, timeout: float) -> None:
        """Reads the run's latest answer if it arrives within ``timeout`` seconds.

        Raises:
            _RunEndedError: If the run has ended.
        """
        with contextlib.suppress(self._ray.exceptions.RayError):  # the actor is being started again
            if self._ray.get(self._stopped, timeout=timeout):
                raise _RunEndedError


#: Options that may name the user's own code, and what finds it.
_OWN_CODE: Mapping[str, Registry[Any]] = {"recipe": RECIPES, "pixels": CODECS, "family": FAMILIES}
_OUR_PACKAGES = frozenset({"vlmdata", "preprocess"})


def _shipped_modules(config: PreprocessConfig) -> list[str]:
    """Returns the files and folders of the user's own code, which workers lack."""
    modules = [registry.target(getattr(config, option)).partition(":")[0] for option, registry in _OWN_CODE.items()]
    return list(dict.fromkeys(place for module in modules if (place := _place_to_ship(module)) is not None))


def _place_to_ship(module: str) -> str | None:
    """Returns the file or folder of a module; None if it is built in or installed."""
    if is_file(module):
        return str(Path(module).resolve())
    spec = find_spec(module.partition(".")[0])
    if spec is None or spec.origin is None:
        return None
    place = Path(spec.origin)
    installed = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")]
    if spec.name in _OUR_PACKAGES or any(place.is_relative_to(folder) for folder in installed):
        return None
    return str(place.parent if spec.submodule_search_locations else place)


def _on_workers(config: PreprocessConfig) -> PreprocessConfig:
    """Returns the configuration with the names by which workers import shipped files."""
    named: dict[str, Any] = {}
    for option, registry in _OWN_CODE.items():
        module, _, attribute = registry.target(getattr(config, option)).partition(":")
        if is_file(module):
            named[option] = f"{Path(module).stem}:{attribute}"
    return dataclasses.replace(config, **named)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@cache
def _ignore_interrupts_at_exit() -> None:
    """Keeps a further ctrl-C from ending Ray's shutdown in a traceback, with some of its processes still running.

    Call it once Ray is imported: what is registered last runs first, and Ray's shutdown runs at exit, too.
    """
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


class _Interrupts:
    """Keeps ctrl-C from interrupting calls of Ray: it is raised by :meth:`check` instead."""

    def __init__(self) -> None:
        self._seen = False
        self._handler: Any = None

    def __enter__(self) -> Self:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._handler = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
        if kind is None:
            self.check()

    def check(self) -> None:
        """Raises KeyboardInterrupt if ctrl-C was pressed."""
        if self._seen:
            raise KeyboardInterrupt

    def _note(self, *_: object) -> None:
        self._seen = True
