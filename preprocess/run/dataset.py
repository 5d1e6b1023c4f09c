"""A run: plan the shards, make those that are missing, and close the dataset. Or make one part of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any, Protocol

from preprocess.chat.tokenizer import ChatTokenizer, load_tokenizer
from preprocess.config import PreprocessConfig
from preprocess.encode.probe import require_usable
from preprocess.engines.base import Engine, ShardWork, errors_named, make_shards
from preprocess.engines.local import Local
from preprocess.recipes.choice import image_root_of
from preprocess.run.claim import Part, part_claim, whole_claim
from preprocess.run.closing import close_dataset
from preprocess.run.directory import (
    ShardPlan,
    begin,
    clear_place,
    identity_of,
    prepare_place,
    resource_errors,
    some,
    tidied,
)
from preprocess.run.earlier_files import EarlierFiles
from preprocess.run.repair import Repair, find_damage, with_deadly_rows
from preprocess.run.row_table import read_row_table
from preprocess.run.version_closing import close_version
from preprocess.run.versions import Newest, VersionInfo, VersionPlan, begin_version, differs_in_rows, plan_version
from preprocess.shards.counters import Counters
from preprocess.shards.fingerprints import identity_changes, refusal, run_identity
from preprocess.shards.job import ShardJob, ShardRecord, finished_records
from preprocess.shards.kept_columns import require_columns
from preprocess.sources.rows import Source
from vlmdata.errors import ConfigMismatchError, DatasetFormatError
from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import MANIFEST_NAME, PROGRESS_DIR, shard_name
from vlmdata.machine import available_cores
from vlmdata.storage import Lock, Store, open_store
from vlmdata.storage.versions import folder_of


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


def preprocess_dataset(
    source: Source,
    out: Store | str | PathLike[str],
    config: PreprocessConfig,
    *,
    workers: int = 1,
    overwrite: bool = False,
    hash_source: bool = False,
    watcher: Watcher | None = None,
    engine: Engine | None = None,
    reuse: Reuse | None = None,
) -> RunResult:
    """Makes a dataset, or continues one that an earlier run of the same configuration began.

    For a finished dataset, it recreates missing or truncated files. If rows of the source or image files were added,
    changed or removed, it makes a new version, of which only what differs is made.

    Args:
        source: An opened source.
        out: Destination of the dataset: a folder, created if absent, or the URL of a folder in an object store.
        config: All options that can change its bytes.
        workers: Number of workers, by default processes; the result does not depend on it.
        overwrite: Whether to remove an existing dataset (of any configuration).
        hash_source: Whether to read all image files of an earlier run's shards to find changes, instead of only
            those modified since.
        watcher: Progress callbacks.
        engine: Where shards are made; by default on this machine. The result does not depend on it.
        reuse: What is taken from another dataset; None makes everything from the source.

    Returns:
        The finished dataset's manifest, and counts of this run.

    Raises:
        DatasetFormatError: If a lost file of a finished dataset cannot be recreated with the same bytes.
        ConfigMismatchError: If ``out`` contains other files, a dataset of another configuration or source, or a
            finished dataset without the record of its rows, of which something has changed.
        ResourceError: If ``out`` is full or not writable, or another run is using it.
        SourceError: If the tokenizer or the recipe cannot be loaded, or the tokenizer cannot be used.
    """
    watcher, engine, store = watcher or Watcher(), engine or Local(), _store(out)
    if overwrite or store.size(MANIFEST_NAME) is None:
        with errors_named(engine):
            engine.warm_up(workers)
    run = _Run.prepared(source, store, config, engine, workers, hash_source, reuse)
    _prepare(store)
    with resource_errors(store, "the run failed"), whole_claim(store) as lock, tidied(store, lock):
        if overwrite:
            clear_place(store)
        newest = Newest.read(store)
        if newest is not None and (changes := run.changes_since(newest)) is not None:
            return _make_version(run, store, newest, changes, lock, watcher)
        finished = begin(store, run.identity, restart=True, newest=None if newest is None else newest.manifest)
        if finished is not None:
            if newest is not None and newest.folder:
                return _as_before(newest)
            return _recreate_lost(run, finished, watcher)
        (ShardPlan.read(store) or run.plan).write(store)
        records, made = run.make(run.jobs, watcher, lock)
        manifest = close_dataset(store, lock, run.identity, records, run.tokenizer)
        return RunResult(manifest, made=made, kept=len(records) - made)


def preprocess_part(
    part: Part,
    source: Source,
    out: Store | str | PathLike[str],
    config: PreprocessConfig,
    *,
    workers: int = 1,
    hash_source: bool = False,
    watcher: Watcher | None = None,
    engine: Engine | None = None,
) -> PartResult:
    """Makes the shards of one part of a run. Parts may be made side by side.

    :func:`preprocess.run.finish.finish_dataset` closes the dataset when all are made.

    Args:
        part: Which part.
        source: The same for all parts.
        out: The same for all parts.
        config: The same for all parts.
        workers: Workers to use for this part.
        hash_source: Whether to read all image files of this part's finished shards.
        watcher: Progress callbacks. Rows and shards are those of the part.
        engine: Where shards are made.

    Raises:
        ConfigMismatchError: If the place holds another run, such as a part with other options.
        ResourceError: If the place is full, or this part or a whole run is at work there.
        SourceError: If the tokenizer or the recipe cannot be loaded, or the tokenizer cannot be used.
    """
    watcher, engine, store = watcher or Watcher(), engine or Local(), _store(out)
    if store.size(MANIFEST_NAME) is None:
        with errors_named(engine):
            engine.warm_up(workers)
    run = _Run.prepared(source, store, config, engine, workers, hash_source)
    jobs = [job for job in run.jobs if part.has(job.number)]
    nothing_to_do = PartResult(part, (), made=0, kept=len(jobs), finished=True)
    if (newest := Newest.read(store)) is not None:
        if (changes := run.changes_since(newest)) is not None:
            return _make_part_of_version(run, store, newest, changes, part, watcher) or nothing_to_do
        begin(store, run.identity, newest=newest.manifest)
        return nothing_to_do
    _prepare(store)
    with resource_errors(store, "the run failed"):
        with part_claim(store, part) as lock:
            if begin(store, run.identity) is None:
                ShardPlan(source.num_rows, config.rows_per_shard, part.parts).write(store)
                records, made = run.make(jobs, watcher, lock)
                return PartResult(part, tuple(records), made=made, kept=len(records) - made)
        store.delete_folder(PROGRESS_DIR)  # finished just now, by another command: nothing to do for any part
    return nothing_to_do


@dataclass(frozen=True, eq=False)
class _Run:
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
    ) -> _Run:
        """Loads the tokenizer, and tries it."""
        tokenizer = load_tokenizer(config.tokenizer, config.tokenizer_revision, config.model_family.name)
        require_usable(tokenizer, config)
        require_columns(source, config.keep_columns)
        identity: Mapping[str, Any] = run_identity(config, tokenizer.info, source.identity, source.times)
        plan = ShardPlan(source.num_rows, config.rows_per_shard)
        work = ShardWork(source, config, store, tokenizer.info)
        if reuse is not None:
            identity, work = reuse.identity(identity), reuse.work(work)
        earlier = EarlierFiles(store, image_root_of(source, config), hash_source)
        jobs = plan.jobs
        return cls(work, plan, tokenizer, identity, earlier, engine, workers, jobs, Counters(len(jobs)))

    def changes_since(self, newest: Newest) -> Changes | None:
        """Returns which rows and image files may have changed since a version was made.

        None if nothing has, or if other things have that make it another run.
        """
        lines = identity_changes(identity_of(newest.manifest), self.identity)
        begins_anew = not newest.folder and newest.manifest.totals.samples == 0
        if begins_anew or (lines and not differs_in_rows(lines)):
            return None
        files = replace(self.earlier, store=newest.store).changed_since(newest.manifest)
        return Changes(lines, files) if lines or files else None

    def compare(self, store: Store, newest: Newest, changes: Changes, watcher: Watcher) -> VersionPlan | None:
        """Returns the version to make; None if all rows are as before.

        Raises:
            ConfigMismatchError: If the rows of the newest version are not known, or none of them is in the source.
        """
        before, earlier = identity_of(newest.manifest), replace(self.earlier, store=newest.store)
        try:
            rows = read_row_table(newest.store, newest.manifest)
        except DatasetFormatError as error:
            if not changes.source:
                raise earlier.refusal(newest.manifest, changes.files, str(error)) from None
            refused = refusal(store, "a finished dataset", changes.source, before, self.identity)
            raise ConfigMismatchError(f"{refused}\n{error}") from None
        paths = {path for each in changes.files.values() for path in each}
        workers = min(self.workers, available_cores())
        plan = plan_version(
            store, newest, rows, self.work.source, paths, workers=workers, on_rows=watcher.rows_compared
        )
        if plan is not None and not plan.info.kept:
            if not changes.source:
                remedy = "No other row is left. Restore them, or use --overwrite to recreate the dataset."
                raise earlier.refusal(newest.manifest, changes.files, remedy)
            refused = refusal(store, "a finished dataset", changes.source, before, self.identity)
            raise ConfigMismatchError(f"{refused}\nNone of its {plan.info.removed:,} rows is in the source.")
        return plan

    def of_version(self, plan: VersionPlan) -> _Run:
        """Returns the run that makes what a version lacks, in the folder of the version."""
        shards = ShardPlan(plan.source.num_rows, self.work.config.rows_per_shard)
        return replace(
            self,
            work=replace(self.work, source=plan.source, store=plan.store),
            plan=shards,
            identity=plan.identity(self.identity),
            earlier=replace(self.earlier, store=plan.store),
            jobs=shards.jobs,
            counters=Counters(max(1, len(shards.jobs))),
        )

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


@dataclass(frozen=True)
class Changes:
    """What may have changed since a dataset was finished."""

    source: Sequence[str]  # differences of the identities of the source, one line each
    files: Mapping[int, Sequence[str]]  # image files that have changed, by shard


def _make_version(run: _Run, store: Store, newest: Newest, changes: Changes, lock: Lock, watcher: Watcher) -> RunResult:
    """Makes the next version of a finished dataset, unless all rows are as before."""
    plan = run.compare(store, newest, changes, watcher)
    if plan is None:
        return _as_before(newest)
    _prepare(plan.store)
    with whole_claim(plan.store) as own:
        version = run.of_version(plan)
        begin_version(plan, version.identity, restart=True)
        plan.store.tidy(PROGRESS_DIR)
        (ShardPlan.read(plan.store) or version.plan).write(plan.store)
        records, made = version.make(version.jobs, watcher, own)
        lock.check()
        manifest = close_version(store, lock, plan.store, newest, version.identity, records)
    return RunResult(manifest, made, len(manifest.shards) - made, folder=folder_of(plan.info.number), version=plan.info)


def _make_part_of_version(
    run: _Run, store: Store, newest: Newest, changes: Changes, part: Part, watcher: Watcher
) -> PartResult | None:
    """Makes one part of the shards of the next version; None if all rows are as before."""
    if (plan := run.compare(store, newest, changes, watcher)) is None:
        return None
    _prepare(plan.store)
    with resource_errors(plan.store, "the run failed"), part_claim(plan.store, part) as own:
        version = run.of_version(plan)
        begin_version(plan, version.identity, restart=False)
        replace(version.plan, parts=part.parts).write(plan.store)
        jobs = [job for job in version.jobs if part.has(job.number)]
        records, made = version.make(jobs, watcher, own)
    return PartResult(part, tuple(records), made=made, kept=len(records) - made)


def _as_before(newest: Newest) -> RunResult:
    """Returns the result of a run that found nothing to do.

    Raises:
        DatasetFormatError: If a file of a version after the first is lost, which is not made again.
    """
    if newest.folder and (damage := find_damage(newest.store, newest.manifest)):
        names = some([newest.store.path(name) for name in damage.names(newest.manifest)])
        raise DatasetFormatError(
            f"{names}: missing, or not as the manifest says. Files of a version after the first are not made again: "
            "restore them from a copy, or use --overwrite to start over, which removes all versions."
        )
    shards = len(newest.manifest.shards)
    return RunResult(newest.manifest, made=0, kept=shards, folder=newest.folder)


def _recreate_lost(run: _Run, manifest: Manifest, watcher: Watcher) -> RunResult:
    """Makes again what a finished dataset lost, if anything."""
    jobs = with_deadly_rows(run.jobs, run.work.store, manifest)
    repair = Repair(run.work, manifest, jobs, run.tokenizer, run.engine, run.workers, run.counters)
    damage = find_damage(run.work.store, manifest)
    if not damage:
        return RunResult(manifest, made=0, kept=len(manifest.shards))
    needed = repair.shards_to_make(damage)
    for number, info in enumerate(manifest.shards):
        if number not in needed:
            repair.counters.keep(number, info)
    kept = len(manifest.shards) - len(needed)
    watcher.started(run.work.source.num_rows, len(manifest.shards), kept, repair.counters)
    repaired = repair.apply(damage, watcher.shard_done)
    made = len(repaired.shards)
    return RunResult(manifest, made, len(manifest.shards) - made, repaired.names(manifest))


def _store(out: Store | str | PathLike[str]) -> Store:
    return open_store(out) if isinstance(out, str | PathLike) else out


def _prepare(store: Store) -> None:
    with resource_errors(store, "cannot be written"):
        prepare_place(store)
