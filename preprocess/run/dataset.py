"""A run: plan the shards, make those that are missing, and close the dataset. Or make one part of them."""

from __future__ import annotations

from os import PathLike

from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import MANIFEST_NAME, PROGRESS_DIR
from vlmdata.preprocess.chat.tokenizer import ChatTokenizer
from vlmdata.preprocess.config import PreprocessConfig
from vlmdata.preprocess.engines.base import Engine, errors_named
from vlmdata.preprocess.engines.local import Local
from vlmdata.preprocess.run.claim import Part, part_claim, whole_claim
from vlmdata.preprocess.run.closing import close_dataset
from vlmdata.preprocess.run.directory import ShardPlan, begin, clear_place, prepare_place, resource_errors, tidied
from vlmdata.preprocess.run.making import PartResult, Reuse, Run, RunResult, Watcher
from vlmdata.preprocess.run.next_version import (
    as_before,
    changes_since,
    make_part_of_version,
    make_version,
    require_whole,
)
from vlmdata.preprocess.run.repair import Repair, find_damage, with_deadly_rows
from vlmdata.preprocess.run.versions import Newest
from vlmdata.preprocess.sources.rows import Source
from vlmdata.storage import Store, open_store

__all__ = ["PartResult", "Reuse", "RunResult", "Watcher", "preprocess_dataset", "preprocess_part"]


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
    tokenizer: ChatTokenizer | None = None,
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
        tokenizer: The tokenizer of ``config``, if already loaded; None loads it.

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
    run = Run.prepared(source, store, config, engine, workers, hash_source, reuse, tokenizer)
    _prepare(store)
    with resource_errors(store, "the run failed"), whole_claim(store) as lock, tidied(store, lock):
        if overwrite:
            clear_place(store)
        newest = Newest.read(store)
        if newest is not None and reuse is None and (changes := changes_since(run, newest)) is not None:
            return make_version(run, store, newest, changes, lock, watcher)
        finished = begin(store, run.identity, restart=True, newest=None if newest is None else newest.manifest)
        if finished is not None:
            if newest is not None and newest.folder:
                require_whole(newest)
                return as_before(newest)
            return _recreate_lost(run, finished, watcher)
        (ShardPlan.read(store) or run.plan).write(store)
        records, made = run.make(run.jobs, watcher, lock)
        manifest = close_dataset(store, lock, run.identity, records, run.tokenizer)
        return RunResult(manifest, made=made, kept=len(records) - made, closed=True)


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
    tokenizer: ChatTokenizer | None = None,
) -> PartResult:
    """Makes the shards of one part of a run. Parts may be made side by side.

    :func:`vlmdata.preprocess.run.finish.finish_dataset` closes the dataset when all are made.

    Args:
        part: Which part.
        source: The same for all parts.
        out: The same for all parts.
        config: The same for all parts.
        workers: Workers to use for this part.
        hash_source: Whether to read all image files of this part's finished shards.
        watcher: Progress callbacks. Rows and shards are those of the part.
        engine: Where shards are made.
        tokenizer: The tokenizer of ``config``, if already loaded; None loads it.

    Raises:
        ConfigMismatchError: If the place holds another run, such as a part with other options.
        ResourceError: If the place is full, or this part or a whole run is at work there.
        SourceError: If the tokenizer or the recipe cannot be loaded, or the tokenizer cannot be used.
    """
    watcher, engine, store = watcher or Watcher(), engine or Local(), _store(out)
    if store.size(MANIFEST_NAME) is None:
        with errors_named(engine):
            engine.warm_up(workers)
    run = Run.prepared(source, store, config, engine, workers, hash_source, tokenizer=tokenizer)
    jobs = [job for job in run.jobs if part.has(job.number)]
    nothing_to_do = PartResult(part, (), made=0, kept=len(jobs), finished=True)
    if (newest := Newest.read(store)) is not None:
        if (changes := changes_since(run, newest)) is not None:
            return make_part_of_version(run, store, newest, changes, part, watcher) or nothing_to_do
        begin(store, run.identity, newest=newest.manifest)
        return nothing_to_do
    _prepare(store)
    with resource_errors(store, "the run failed"):
        with part_claim(store, part) as lock:
            if begin(store, run.identity) is None:
                ShardPlan.of(source.num_rows, config.rows_per_shard, part.parts).write(store)
                records, made = run.make(jobs, watcher, lock)
                return PartResult(part, tuple(records), made=made, kept=len(records) - made)
        store.delete_folder(PROGRESS_DIR)  # finished just now, by another command: nothing to do for any part
    return nothing_to_do


def _recreate_lost(run: Run, manifest: Manifest, watcher: Watcher) -> RunResult:
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
