"""A whole run: plan the shards, make those that are missing, and close the dataset directory."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from preprocess.chat.tokenizer import load_tokenizer
from preprocess.closing import close_dataset
from preprocess.config import PreprocessConfig
from preprocess.counters import Counters
from preprocess.earlier_files import EarlierFiles
from preprocess.engines.base import Engine, ShardWork, make_shards, system_message
from preprocess.engines.local import Local
from preprocess.fingerprints import identity_changes, run_identity, tokenizer_identity
from preprocess.probe import require_usable
from preprocess.recipes.choice import image_root_of
from preprocess.repair import Repair, find_damage
from preprocess.shard_job import (
    PROGRESS_DIR,
    RUN_FILE,
    ShardJob,
    ShardRecord,
    finished_record,
)
from preprocess.sources.rows import Source
from vlmdata.errors import ConfigMismatchError, ResourceError
from vlmdata.format.atomic import temporary_target, write_atomically
from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import (
    IMAGE_FILES,
    IMAGE_FILES_NAME,
    INDEX_NAME,
    LEDGER_NAME,
    MANIFEST_NAME,
    TOKENIZER_DIR,
    shard_name,
)

_LOCK_FILE = "lock"
_SHARD = re.compile(r"shard-\d{6,}\.tar")


@dataclass(frozen=True)
class Watcher:
    """Callbacks that follow a run.

    Attributes:
        started: Called once with the number of rows and shards, how many shards are already whole, and the live
            counters.
        shard_done: Called with the record of every shard made in this run.
        files_changed: Called with the numbers of shards that are made again because image files have changed since,
            and the paths of these files.
    """

    started: Callable[[int, int, int, Counters], None] = lambda rows, shards, done, counters: None
    shard_done: Callable[[ShardRecord], None] = lambda record: None
    files_changed: Callable[[Mapping[int, Sequence[str]]], None] = lambda changed: None


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Attributes:
        manifest: Of the finished dataset.
        made: Shards made in this run.
        kept: Shards that were already whole.
        mended: Names of the files and folders that a finished dataset had lost and that were made again.
    """

    manifest: Manifest
    made: int
    kept: int
    mended: tuple[str, ...] = ()


def preprocess_dataset(
    source: Source,
    directory: Path,
    config: PreprocessConfig,
    *,
    workers: int = 1,
    overwrite: bool = False,
    hash_source: bool = False,
    watcher: Watcher | None = None,
    engine: Engine | None = None,
) -> RunResult:
    """Makes a dataset directory, or continues one that an earlier run of the same configuration began.

    Of a finished dataset it makes again what is missing or cut.

    Args:
        source: An opened source.
        directory: Where the dataset goes; made if absent.
        config: All options that can change its bytes.
        workers: Workers to use, by default processes; the result does not depend on it.
        overwrite: Whether to remove a dataset (of any configuration) that stands there.
        hash_source: Whether to read all image files of shards that an earlier run made, to find those that have
            changed, and not only those that were touched since.
        watcher: Progress callbacks.
        engine: Where shards are made; by default on this machine. The result does not depend on it.

    Returns:
        The finished dataset's manifest, and what this run did.

    Raises:
        DatasetFormatError: If a file of a finished dataset that was lost cannot be made again as it was.
        ConfigMismatchError: If the directory holds a dataset of another configuration or source, or other files; or
            a finished one whose image files have changed.
        ResourceError: If the disk is full or another run is at work there.
        SourceError: If the tokenizer or the recipe cannot be loaded, or the tokenizer cannot be used.
    """
    watcher, engine = watcher or Watcher(), engine or Local()
    if overwrite or not (directory / MANIFEST_NAME).exists():
        engine.warm_up(workers)
    tokenizer = load_tokenizer(config.tokenizer, config.tokenizer_revision)
    require_usable(tokenizer, config)
    identity = run_identity(config, tokenizer.info, source.identity)
    with _resource_errors(directory, "cannot be written"):
        _make_directory(directory)
    with _locked(directory), _resource_errors(directory, "the run failed"):
        if overwrite:
            _clear(directory)
        jobs = _plan(source.num_rows, config.rows_per_shard)
        finished = _continue(directory, identity)
        earlier = EarlierFiles(directory, image_root_of(source, config), hash_source)
        work, counters = ShardWork(source, config, directory, tokenizer.info), Counters(len(jobs))
        if finished is not None:
            earlier.require_unchanged(finished)
            return _mend(Repair(work, finished, jobs, tokenizer, engine, workers, counters), watcher)
        records = {job.number: record for job in jobs if (record := finished_record(directory, job))}
        if changed := earlier.forget_changed(records):
            watcher.files_changed(changed)
        for number, record in records.items():
            counters.finish(number, record.totals)
        kept = len(records)
        watcher.started(source.num_rows, len(jobs), kept, counters)
        missing = [job for job in jobs if job.number not in records]
        for job in missing:  # a shard without its record is as good as none; on a small disk it is in the way
            (directory / shard_name(job.number)).unlink(missing_ok=True)
        for number, record in make_shards(engine, work, missing, workers, counters):
            records[number] = record
            watcher.shard_done(record)
        ordered = [records[job.number] for job in jobs]
        return RunResult(close_dataset(directory, identity, ordered, tokenizer), made=len(missing), kept=kept)


def _mend(repair: Repair, watcher: Watcher) -> RunResult:
    """Makes again what a finished dataset lost, if anything."""
    manifest, work = repair.manifest, repair.work
    damage = find_damage(work.directory, manifest)
    if not damage:
        return RunResult(manifest, made=0, kept=len(manifest.shards))
    needed = repair.shards_to_make(damage)
    for number, info in enumerate(manifest.shards):
        if number not in needed:
            repair.counters.table()[number] = (info.row_stop - info.row_start, 0, 0, info.rejected)
    watcher.started(work.source.num_rows, len(manifest.shards), len(manifest.shards) - len(needed), repair.counters)
    mended = repair.mend(damage, watcher.shard_done)
    made = len(mended.shards)
    return RunResult(manifest, made, len(manifest.shards) - made, mended.names(manifest))


def _plan(rows: int, rows_per_shard: int) -> list[ShardJob]:
    starts = range(0, rows, rows_per_shard)
    return [ShardJob(n, start, min(start + rows_per_shard, rows)) for n, start in enumerate(starts)]


@contextmanager
def _resource_errors(directory: Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ResourceError(
            f"{directory}: {what}: {system_message(error)}. What is finished is kept; make room (or permission) and "
            "run the same command again."
        ) from error


def _make_directory(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    foreign = [entry.name for entry in directory.iterdir() if not _is_ours(entry.name)]
    if foreign:
        raise ConfigMismatchError(
            f"{directory}: holds other files ({_some(foreign)}); give --out an empty or new folder"
        )
    (directory / PROGRESS_DIR).mkdir(exist_ok=True)


def _some(names: list[str]) -> str:
    shown = sorted(names)[:5]
    return ", ".join(shown) + (f", … {len(names)} in all" if len(names) > len(shown) else "")


def _is_ours(name: str) -> bool:
    final = temporary_target(name) or name
    fixed = (MANIFEST_NAME, INDEX_NAME, LEDGER_NAME, IMAGE_FILES_NAME, TOKENIZER_DIR, PROGRESS_DIR)
    return final in fixed or _SHARD.fullmatch(final) is not None


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Holds the directory against a second run; the lock ends with the process, however that ends."""
    lock = FileLock(directory / PROGRESS_DIR / _LOCK_FILE)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ResourceError(
            f"{directory}: another `vlmdata preprocess` is at work there; wait for it or stop it"
        ) from None
    try:
        yield
    finally:
        with suppress(OSError):
            _remove_leftovers(directory)
        # Removed while it is locked, so that no other run can have begun to use it.
        if (directory / MANIFEST_NAME).exists() or not (directory / PROGRESS_DIR / RUN_FILE).exists():
            shutil.rmtree(directory / PROGRESS_DIR, ignore_errors=True)
        lock.release()


def _remove_leftovers(directory: Path) -> None:
    """Removes what processes that failed or were killed had begun to write."""
    shutil.rmtree(directory / PROGRESS_DIR / TOKENIZER_DIR, ignore_errors=True)
    for entry in [*directory.iterdir(), *(directory / PROGRESS_DIR).iterdir()]:
        if temporary_target(entry.name) is not None:
            entry.unlink()


def _clear(directory: Path) -> None:
    # The manifest goes first: without it nothing takes what is left for a dataset. The record of the run goes last:
    # as long as anything is left of an unfinished run, no run of another configuration can mistake it for its own.
    kept = directory / PROGRESS_DIR
    (directory / MANIFEST_NAME).unlink(missing_ok=True)
    for entry in [*directory.iterdir(), *kept.iterdir()]:
        if entry.is_dir() and entry != kept:
            shutil.rmtree(entry)
        elif not entry.is_dir() and entry.name not in (_LOCK_FILE, RUN_FILE):
            entry.unlink()
    (kept / RUN_FILE).unlink(missing_ok=True)


def _continue(directory: Path, identity: dict[str, Any]) -> Manifest | None:
    """Checks that what stands in the directory is of the same run; returns its manifest if it is finished."""
    _remove_leftovers(directory)
    run_file = directory / PROGRESS_DIR / RUN_FILE
    manifest = Manifest.read(directory) if (directory / MANIFEST_NAME).exists() else None
    if manifest is not None:
        before: Any = {
            "config": manifest.config,
            "source": {name: value for name, value in manifest.source.items() if name != IMAGE_FILES},
            "tokenizer": tokenizer_identity(manifest.tokenizer),
        }
    elif run_file.exists():
        before = json.loads(run_file.read_bytes())
    else:
        stray = [entry.name for entry in directory.iterdir() if entry.name != PROGRESS_DIR]
        if stray:
            raise ConfigMismatchError(
                f"{directory}: holds {_some(stray)}, but no manifest and no record of a run that made them. "
                "Give --out an empty or new folder, or --overwrite to remove them."
            )
        write_atomically(run_file, json.dumps(identity, sort_keys=True).encode())
        return None
    changed = identity_changes(before, identity)
    if _accepted_nothing(directory, manifest, bool(changed)):
        _clear(directory)
        write_atomically(run_file, json.dumps(identity, sort_keys=True).encode())
        return None
    if changed:
        state = "a finished dataset" if manifest else "an unfinished run"
        listed = "\n".join(f"  {line}" for line in changed)
        raise ConfigMismatchError(
            f"{directory}: holds {state} of another configuration:\n{listed}\n"
            "Repeat the earlier options to continue it, give another --out, or --overwrite to start anew."
        )
    return manifest


def _accepted_nothing(directory: Path, manifest: Manifest | None, changed: bool) -> bool:
    """True if nothing is lost by starting anew: no row was accepted, with these options or others.

    A finished dataset without samples is made again even with the same options, as what they refer to (files, URLs,
    installed packages) may have been mended. An unfinished run with the same options is continued.
    """
    if manifest is not None:
        return manifest.totals.samples == 0
    if not changed:
        return False
    # A shard without its record may hold samples, and so may one whose shard is being removed.
    shards = {path.stem for path in directory.glob("shard-*.tar")}
    records = {path.stem: path for path in (directory / PROGRESS_DIR).glob("shard-*.json")}
    return all(name in records for name in shards) and all(_is_empty(path) for path in records.values())


def _is_empty(record: Path) -> bool:
    try:
        return ShardRecord.read(record).info.samples == 0
    except (OSError, ValueError, KeyError, TypeError):  # of another version, perhaps
        return False
