"""What a run is made of, what follows it, and what it gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import shard_name
from vlmdata.preprocess.chat.inference import opens_a_block
from vlmdata.preprocess.chat.tokenizer import ChatTokenizer, load_tokenizer
from vlmdata.preprocess.config import PreprocessConfig, TrainThink
from vlmdata.preprocess.encode.probe import require_usable
from vlmdata.preprocess.engines.base import Engine, ShardWork, make_shards
from vlmdata.preprocess.recipes.choice import image_root_of
from vlmdata.preprocess.run.claim import Part
from vlmdata.preprocess.run.directory import ShardPlan
from vlmdata.preprocess.run.earlier_files import EarlierFiles
from vlmdata.preprocess.run.versions import VersionInfo
from vlmdata.preprocess.shards.counters import Counters
from vlmdata.preprocess.shards.fingerprints import run_identity
from vlmdata.preprocess.shards.job import ShardJob, ShardRecord, finished_records
from vlmdata.preprocess.shards.kept_columns import require_columns
from vlmdata.preprocess.sources.rows import Source
from vlmdata.storage import Lock, Store


@dataclass(frozen=True)
class Watcher:
    """Callbacks that follow a run."""

    #: Called once with the numbers of rows, shards and finished shards, and the live counters.
    started: Callable[[int, int, int, Counters], None] = lambda rows, shards, done, counters: None
    #: Called with the record of each shard made in this run.
    shard_done: Callable[[ShardRecord], None] = lambda record: None
    #: Called with the shards that are recreated because image files have changed, and these files.
    files_changed: Callable[[Mapping[int, Sequence[str]]], None] = lambda changed: None
    #: Called with the number of rows that were compared with those of a finished dataset.
    rows_compared: Callable[[int], None] = lambda rows: None


class Reuse(Protocol):
    """What a run takes from another dataset instead of making it."""

    def identity(self, identity: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns what another run must share to continue this one, given that of a run that makes everything."""

    def work(self, work: ShardWork) -> ShardWork:
        """Returns what makes shards, given that of a run that makes everything."""


@dataclass(frozen=True)
class RunResult:
    """Result of a run: numbers of shards made now and kept, and names of lost files and folders that were recreated."""

    manifest: Manifest
    made: int
    kept: int
    repaired: tuple[str, ...] = ()
    folder: str = ""  # of the files of the version in the dataset; empty for the first
    version: VersionInfo | None = None  # the version that this run made, if any
    closed: bool = False  # whether this run completed the dataset, perhaps of shards that others made


@dataclass(frozen=True)
class PartResult:
    """Result of a part: the records of its shards, and numbers of shards made now and kept.

    If the dataset was ``finished`` before, there was nothing to do, and there are no records.
    """

    part: Part
    records: tuple[ShardRecord, ...]
    made: int
    kept: int
    finished: bool = False


@dataclass(frozen=True, eq=False)
class Run:
    """What a run is made of, whole or in parts."""

    work: ShardWork
    plan: ShardPlan
    tokenizer: ChatTokenizer
    identity: Mapping[str, Any]  # what another run must share to continue this one
    earlier: EarlierFiles
    engine: Engine
    workers: int
    jobs: Sequence[ShardJob]
    counters: Counters = field(repr=False)

    @classmethod
    def prepared(
        cls,
        source: Source,
        store: Store,
        config: PreprocessConfig,
        engine: Engine,
        workers: int,
        hash_source: bool,
        reuse: Reuse | None = None,
        tokenizer: ChatTokenizer | None = None,
    ) -> Run:
        """Prepares a run. Loads the tokenizer if it is None, and checks that it is usable."""
        if tokenizer is None:
            tokenizer = load_tokenizer(config.tokenizer, config.tokenizer_revision, config.model_family)
        require_usable(tokenizer, config)
        require_columns(source, config.keep_columns)
        require_columns(source, [] if config.id_column is None else [config.id_column], "--id")
        block = config.train_think is TrainThink.AUTO and opens_a_block(tokenizer, config.chat_template_kwargs)
        identity: Mapping[str, Any] = run_identity(config, tokenizer.info, source.identity, source.times, block)
        plan = ShardPlan.of(source.num_rows, config.rows_per_shard)
        work = ShardWork(source, config, store, tokenizer.info, tokenizer)
        if reuse is not None:
            identity, work = reuse.identity(identity), reuse.work(work)
        earlier = EarlierFiles(store, image_root_of(source, config), hash_source)
        jobs = plan.jobs
        return cls(work, plan, tokenizer, identity, earlier, engine, workers, jobs, Counters(len(jobs)))

    def make(self, jobs: Sequence[ShardJob], watcher: Watcher, lock: Lock) -> tuple[list[ShardRecord], int]:
        """Makes those of some shards that are missing; returns the records of all in order, and how many it made."""
        store = self.work.store
        records = finished_records(store, jobs)
        if changed := self.earlier.forget_changed(records):
            watcher.files_changed(changed)
        for number, record in records.items():
            self.counters.finish(number, record)
        rows = sum(job.row_stop - job.row_start for job in jobs)
        if jobs:  # a version that only removes rows makes no shard
            watcher.started(rows, len(jobs), len(records), self.counters)
        missing = [job for job in jobs if job.number not in records]
        # A shard without its record is useless and takes space.
        standing = store.listing()
        store.delete(name for job in missing if (name := shard_name(job.number)) in standing)
        for number, record in make_shards(self.engine, self.work, missing, self.workers, self.counters):
            lock.check()
            records[number] = record
            watcher.shard_done(record)
        lock.check()
        return [records[job.number] for job in jobs], len(missing)
