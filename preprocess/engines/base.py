"""The engine interface. An engine makes the shards of a run, in any order and anywhere."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pickle import PicklingError
from typing import Any, Protocol

from vlmdata.errors import ResourceError, SourceError, VlmdataError, with_causes
from vlmdata.format.schema import shard_name
from vlmdata.format.tokenizer_info import TokenizerInfo
from vlmdata.machine import available_cores
from vlmdata.preprocess.chat.tokenizer import ChatTokenizer
from vlmdata.preprocess.config import PreprocessConfig
from vlmdata.preprocess.own_options import make_own
from vlmdata.preprocess.registries import ENGINES
from vlmdata.preprocess.shards.counters import Counters
from vlmdata.preprocess.shards.job import RowOutcome, ShardContext, ShardJob, ShardRecord, run_shard
from vlmdata.preprocess.sources.rows import Source
from vlmdata.registry import problem_of, shown_name
from vlmdata.storage import Store
from vlmdata.wording import with_article
from vlmdata.workers import WorkerError


@dataclass(frozen=True, eq=False)
class ShardWork:
    """Everything that a worker needs to make any shard of a run. Small and cheap to pickle."""

    #: The rows. A worker that shares memory with others takes a pickled copy, as sources keep files open.
    source: Source
    config: PreprocessConfig  # all options that can change the bytes
    store: Store  # destination of shards and their records; every worker must be able to write to it
    tokenizer: TokenizerInfo  # the tokenizer at the start of the run
    loaded: ChatTokenizer | None = field(default=None, repr=False)  # that tokenizer; None in other processes

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "loaded": None}

    def prepare(self) -> ShardContext:
        """Loads tokenizer and recipe, and limits torch to one thread. Call it once per worker.

        Raises:
            SourceError: If the tokenizer's files have changed since the start of the run.
        """
        import torch

        torch.set_num_threads(1)
        return ShardContext.build(self.source, self.config, self.store, self.tokenizer, self.loaded)


class Engine(Protocol):
    """Runs shard jobs. The bytes of a dataset depend neither on the engine nor on the number of workers.

    Its constructor may take ``options``, an instance of its frozen dataclass ``Options`` (see
    ``preprocess/own_options.py``), and ``watch``: whether to say where this process ended, if it dies.
    """

    def default_workers(self, config: PreprocessConfig) -> int:
        """Workers to use if the user names no number: one per core of this machine, unless the engine has others.

        Args:
            config: Of the run to come.
        """
        return available_cores()

    def warm_up(self, workers: int) -> None:
        """Starts workers early, while the run is being prepared, if useful.

        Args:
            workers: See :meth:`run`.
        """

    def run(
        self, work: ShardWork, jobs: Sequence[ShardJob], workers: int, counters: Counters
    ) -> Generator[ShardRecord]:
        """Makes shards with :func:`make_shard`. Yields the record of each finished shard, in any order.

        A job may run again if its worker is lost. After the generator is closed, no worker is left.

        Args:
            work: Data for workers.
            jobs: Shards to make.
            workers: The largest number of workers.
            counters: Row counters for the progress display. A worker that cannot reach this memory ignores it; its
                shards are counted when finished.

        Raises:
            VlmdataError: As raised by a worker.
            ResourceError: If workers keep dying.
        """
        ...


class RowCounter(Protocol):
    """Counts the rows of shards while they are made."""

    def start(self, shard: int) -> None:
        """Begins a shard, perhaps again."""

    def add(self, shard: int, outcome: RowOutcome) -> None:
        """Counts a row."""


def make_shard(job: ShardJob, context: ShardContext, counters: RowCounter | None = None) -> ShardRecord:
    """Makes one shard and its records. Every engine calls this in its workers.

    Args:
        job: The shard.
        context: The worker's context, from :meth:`ShardWork.prepare`.
        counters: Counts rows, if the worker can reach the run.

    Raises:
        ResourceError: If memory is short, or the disk is full or not writable. Leaves no partial file.
    """
    count = None
    if counters is not None:
        counters.start(job.number)
        count = partial(counters.add, job.number)
    try:
        return run_shard(job, context, count)
    except (OSError, MemoryError) as error:
        if isinstance(error, MemoryError):
            what, remedy = "out of memory", "use fewer --workers or a lower --max-source-pixels"
        else:
            what, remedy = system_message(error), "free space or fix permissions"
        raise ResourceError(
            f"{context.store}: shard {job.number} ({rows_of(job, context.source)}) failed: {what}. "
            f"Finished shards are kept; {remedy} and run the same command again to continue."
        ) from error


def make_shards(
    engine: Engine, work: ShardWork, jobs: Sequence[ShardJob], workers: int, counters: Counters
) -> Iterator[tuple[int, ShardRecord]]:
    """Makes shards with an engine. Yields number and record of each finished shard.

    Raises:
        SourceError: If the engine is the user's and fails, or yields anything but the record of each shard once.
    """
    waiting = {shard_name(job.number): job.number for job in jobs}
    with closing(_made(engine, work, jobs, workers, counters)) as made:
        for record in made:
            if not isinstance(record, ShardRecord):
                what = with_article(type(record).__name__)
                raise _unfit(engine, f"`run` yielded {what}, not the ShardRecord that make_shard returns")
            number = waiting.pop(record.info.name, None)
            if number is None:
                raise _unfit(engine, f"`run` yielded {record.info.name} twice, or without a job for it")
            counters.finish(number, record)
            yield number, record
    if waiting:
        raise _unfit(engine, f"`run` ended without {', '.join(waiting)}")


def _made(
    engine: Engine, work: ShardWork, jobs: Sequence[ShardJob], workers: int, counters: Counters
) -> Generator[object]:
    """Yields what the engine yields; names it in errors of a user's engine."""
    with errors_named(engine):
        made: object = engine.run(work, jobs, workers, counters)  # a user's engine may return anything
        if not isinstance(made, Generator):
            what = with_article(type(made).__name__)
            raise _unfit(engine, f"`run` returned {what}, not a generator: it must `yield` the records")
        with closing(made):
            yield from made


@contextmanager
def errors_named(engine: Engine) -> Iterator[None]:
    """Names the engine, file and line in unexpected errors of a user's engine.

    Raises:
        SourceError: In place of such an error.
    """
    module = type(engine).__module__
    try:
        yield
    except (VlmdataError, WorkerError):
        raise
    except Exception as error:
        if _is_built_in(engine):
            raise
        shown, remedy = shown_name(module), ""
        own_file = shown != module
        if own_file and any(_is_of_sending(each, module) for each in with_causes(error)):
            remedy = (
                " Other processes cannot import what is given as file.py:attribute, so its functions and classes "
                f"cannot be sent to them: set PYTHONPATH to the file's folder and give --engine "
                f"{shown}:{type(engine).__name__}."
            )
        raise SourceError(
            f"{_named(engine)}: it failed: {problem_of(error, module)}. Finished shards are kept.{remedy}"
        ) from error


def _is_of_sending(error: BaseException, module: str) -> bool:
    """Tells whether a function of a module could not be sent to another process, or that process died of it."""
    if isinstance(error, ImportError):
        return error.name == module
    return isinstance(error, PicklingError | BrokenExecutor)


def _unfit(engine: Engine, what: str) -> Exception:
    """Returns the error of an engine that does not keep the rules: of a built-in one, a bug."""
    if _is_built_in(engine):
        return RuntimeError(f"{_named(engine)}: {what}")
    return SourceError(f"{_named(engine)}: {what}. Finished shards are kept. The rules are in docs/extend/engine.md.")


def _is_built_in(engine: Engine) -> bool:
    return type(engine).__module__.startswith(f"{__package__}.")


def _named(engine: Engine) -> str:
    """Returns how the command names the engine: ``--engine threads.py:Threads``."""
    module, kind = type(engine).__module__, type(engine).__name__
    shown = shown_name(module)
    return f"--engine {shown}{'.py' if shown != module else ''}:{kind}"


def load_engine(name: str, options: Mapping[str, Any] | None = None) -> Engine:
    """Loads an engine by name, as ``module:attribute`` or as ``file.py:attribute``.

    Args:
        name: The name.
        options: Its options by name, as text or values; omitted options have their defaults.

    Raises:
        SourceError: If there is none, it is no engine, or the options are invalid.
    """
    engine: Engine = make_own(ENGINES, name, options or {}, {"watch": True})
    for method in ("run", "default_workers", "warm_up"):
        if not callable(found := getattr(engine, method, None)):
            but = "" if found is None else f", but {with_article(type(found).__name__)} of this name"
            raise SourceError(
                f"--engine {name}: it has no method `{method}`{but}. Derive it from "
                "vlmdata.preprocess.engines.base.Engine."
            )
    return engine


def rows_of(job: ShardJob, source: Source) -> str:
    """Describes the rows of a job."""
    return f"rows {source.numbers[job.row_start]} to {source.numbers[job.row_stop - 1]}"


def system_message(error: OSError) -> str:
    """Returns the system's error message, without additions of libraries."""
    return str(error) if error.errno is None else os.strerror(error.errno)
