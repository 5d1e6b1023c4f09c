"""What an engine is: it makes the shards of a run, in any order and anywhere."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from preprocess.config import PreprocessConfig
from preprocess.counters import Counters
from preprocess.registry import find
from preprocess.shard_job import ShardContext, ShardJob, ShardRecord, run_shard
from preprocess.sources.rows import Source
from vlmdata.errors import ResourceError
from vlmdata.format.manifest import TokenizerInfo
from vlmdata.format.schema import shard_name

#: Engines by name. A new one is a file beside this with a class that is an Engine, and a line here.
REGISTRY: Mapping[str, str] = {"local": "preprocess.engines.local:Local"}


@dataclass(frozen=True, eq=False)
class ShardWork:
    """What a worker needs to make any shard of a run. Small, and cheap to pickle.

    Attributes:
        source: The rows. A worker that shares memory with others takes a pickled copy, as sources keep files open.
        config: All options that can change the bytes.
        directory: Where shards and their records go; every worker must be able to write there.
        tokenizer: The tokenizer as the run found it when it began.
    """

    source: Source
    config: PreprocessConfig
    directory: Path
    tokenizer: TokenizerInfo

    def prepare(self) -> ShardContext:
        """Loads tokenizer and recipe, and keeps torch to one thread: a worker is one core. Once per worker.

        Raises:
            SourceError: If the tokenizer's files were edited since the run began.
        """
        import torch

        torch.set_num_threads(1)
        return ShardContext.build(self.source, self.config, self.directory, self.tokenizer)


class Engine(Protocol):
    """Runs shard jobs. The bytes of a dataset do not depend on it, nor on the number of workers."""

    def warm_up(self, workers: int) -> None:
        """Begins to start workers while the run is still being prepared, if there is anything to begin.

        Args:
            workers: As in :meth:`run`.
        """

    def run(
        self, work: ShardWork, jobs: Sequence[ShardJob], workers: int, counters: Counters
    ) -> Generator[ShardRecord]:
        """Makes shards with :func:`make_shard`, yielding each record as it is finished, in any order.

        A job may be run again if its worker is lost. When the generator is closed, no worker is left.

        Args:
            work: What workers need.
            jobs: Shards to make.
            workers: The largest number of workers.
            counters: Counts rows for the progress display. A worker that cannot reach this memory leaves it alone; its
                shards are counted when they are finished.

        Raises:
            VlmdataError: What a worker raised.
            ResourceError: If workers keep dying.
        """
        ...


def make_shard(job: ShardJob, context: ShardContext, counters: Counters | None = None) -> ShardRecord:
    """Makes one shard and its records: what every engine calls in its workers.

    Args:
        job: The shard.
        context: The worker's, from :meth:`ShardWork.prepare`.
        counters: Counts rows, if the worker shares memory with the run.

    Raises:
        ResourceError: If memory ran out, or the disk is full or not writable. No partial file is left.
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
            what, remedy = system_message(error), "make room (or permission)"
        raise ResourceError(
            f"{context.directory}: shard {job.number} ({rows_of(job, context.source)}) failed: {what}. "
            f"Finished shards are kept; {remedy} and run the same command again to continue."
        ) from error


def make_shards(
    engine: Engine, work: ShardWork, jobs: Sequence[ShardJob], workers: int, counters: Counters
) -> Iterator[tuple[int, ShardRecord]]:
    """Makes shards with an engine, yielding number and record of each as it is finished.

    Raises:
        RuntimeError: If the engine yields another shard than it was given, one twice, or too few.
    """
    waiting = {shard_name(job.number): job.number for job in jobs}
    with closing(engine.run(work, jobs, workers, counters)) as made:
        for record in made:
            number = waiting.pop(record.info.name, None)
            if number is None:
                raise RuntimeError(f"engine {type(engine).__name__} gave {record.info.name}, for which no job waits")
            counters.finish(number, record.totals)
            yield number, record
    if waiting:
        raise RuntimeError(f"engine {type(engine).__name__} ended without {', '.join(waiting)}")


def load_engine(name: str) -> Engine:
    """An engine by registered name or as ``module:attribute``.

    Raises:
        SourceError: If there is none.
    """
    engine: Engine = find("--engine", name, REGISTRY)()
    return engine


def rows_of(job: ShardJob, source: Source) -> str:
    """The rows of a job, in words."""
    return f"rows {source.numbers[job.row_start]} to {source.numbers[job.row_stop - 1]}"


def system_message(error: OSError) -> str:
    """What the system says of an error, without the additions of libraries."""
    return str(error) if error.errno is None else os.strerror(error.errno)
