"""The directory of a run: creates and clears it, and checks whether a run can be continued there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

from vlmdata.errors import ConfigMismatchError, DatasetFormatError, ResourceError
from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import (
    IMAGE_FILES,
    IMAGE_FILES_NAME,
    INDEX_NAME,
    LEDGER_NAME,
    MANIFEST_NAME,
    PROGRESS_DIR,
    ROWS_NAME,
    TOKENIZER_DIR,
    VERSIONS_DIR,
    VERSIONS_NAME,
)
from vlmdata.preprocess.engines.base import system_message
from vlmdata.preprocess.shards.fingerprints import identity_changes, refusal, tokenizer_identity
from vlmdata.preprocess.shards.job import RUN_FILE, ShardJob, ShardRecord, plan_shards
from vlmdata.storage import Lock, LockedError, Store

#: The lock of a whole run.
LOCK_FILE = f"{PROGRESS_DIR}/lock"
#: Names of shards.
SHARD_FILE = re.compile(r"shard-\d{6,}\.tar")
_PLAN_FILE = f"{PROGRESS_DIR}/plan.json"
_RECORD = re.compile(r"shard-\d{6,}\.json")


@contextmanager
def resource_errors(store: Store, what: str) -> Iterator[None]:
    """Converts system errors to an error with the place and the remedy."""
    try:
        yield
    except OSError as error:
        raise ResourceError(
            f"{store}: {what}: {system_message(error)}. Finished work is kept; free space or fix permissions, "
            "then run the same command again."
        ) from error


def prepare_place(store: Store) -> None:
    """Creates the place and its progress folder. Raises a ConfigMismatchError if it contains only other files."""
    store.prepare()
    foreign = [name for name in store.listing() if not is_ours(store.final_name(name))]
    if foreign and store.size(MANIFEST_NAME) is None and store.size(RUN_FILE) is None:
        raise ConfigMismatchError(f"{store}: contains other files ({some(foreign)}); give an empty or new --out folder")
    store.prepare(PROGRESS_DIR)


def some(names: list[str]) -> str:
    """Returns the first names, for a message."""
    shown = sorted(names)[:5]
    return ", ".join(shown) + (f", … {len(names)} in total" if len(names) > len(shown) else "")


def is_ours(name: str) -> bool:
    """True for the name of a file or folder of a dataset or a run."""
    files = (MANIFEST_NAME, INDEX_NAME, LEDGER_NAME, IMAGE_FILES_NAME, ROWS_NAME, VERSIONS_NAME)
    return name in (*files, TOKENIZER_DIR, PROGRESS_DIR) or SHARD_FILE.fullmatch(name) is not None


def clear_place(store: Store) -> None:
    """Removes a dataset and the remains of unfinished runs. Files of others beside them stay."""
    # The manifests go first: without them, nothing treats the rest as a dataset. The record of the run goes last: while
    # anything is left of an unfinished run, no run of another configuration can mistake it for its own.
    store.delete([MANIFEST_NAME])
    store.delete([VERSIONS_NAME])
    ours = [name for name in store.listing() if is_ours(store.final_name(name)) and name != PROGRESS_DIR]
    folders = [name for name in ours if store.final_name(name) == TOKENIZER_DIR]
    folders += [f"{VERSIONS_DIR}/{name}" for name in store.listing(VERSIONS_DIR) if name.isdecimal()]
    store.delete(name for name in ours if name not in folders)
    for name in folders:
        store.delete_folder(name)
    if not store.listing(VERSIONS_DIR):
        store.delete_folder(VERSIONS_DIR)
    store.delete_folder(PROGRESS_DIR, keep=[name.rpartition("/")[2] for name in (LOCK_FILE, RUN_FILE)])
    store.delete([RUN_FILE])


def read_manifest(store: Store) -> Manifest | None:
    """Reads the manifest of a finished dataset; None if there is none."""
    try:
        return Manifest.from_json(store.read(MANIFEST_NAME), store.path(MANIFEST_NAME))
    except FileNotFoundError:
        return None


#: Shards of a run at most.
_MOST_SHARDS = 10_000_000
#: Shards that a set has at least, as far as each has the fewest rows; and rows of a shard at most.
_SHARDS, _FEWEST_ROWS, _MOST_ROWS = 64, 8, 256


@dataclass(frozen=True)
class ShardPlan:
    """The division of a run into shards and parts: 1 if the run is not divided."""

    rows: int
    rows_per_shard: int
    parts: int = 1

    @property
    def jobs(self) -> list[ShardJob]:
        """All shards."""
        return plan_shards(self.rows, self.rows_per_shard)

    @classmethod
    def of(cls, rows: int, rows_per_shard: int | None, parts: int = 1) -> ShardPlan:
        """Plans a number of rows; without rows per shard, these go by that number, and by nothing else."""
        by_size = min(_MOST_ROWS, max(_FEWEST_ROWS, -(-rows // _SHARDS)))
        return cls(rows, by_size if rows_per_shard is None else rows_per_shard, parts)

    @classmethod
    def read(cls, store: Store) -> ShardPlan | None:
        """Reads the plan of the unfinished run in a store; None if none is recorded."""
        try:
            plan = cls(**json.loads(store.read(_PLAN_FILE)))
            whole = all(type(number) is int for number in asdict(plan).values())
            if not whole or plan.rows_per_shard < 1 or not 0 <= plan.rows <= _MOST_SHARDS * plan.rows_per_shard:
                raise ValueError(f"its numbers are {asdict(plan)}"[:200])
            return plan
        except FileNotFoundError:
            return None
        except (RecursionError, TypeError, ValueError) as error:
            raise _no_record(store, _PLAN_FILE, error) from error

    def write(self, store: Store) -> None:
        """Records the plan of the run at work in a store. Several parts may do so at the same moment."""
        if ShardPlan.read(store) != self:
            store.put(_PLAN_FILE, json.dumps(asdict(self)).encode())


def begin(
    store: Store, identity: Mapping[str, Any], *, restart: bool = False, newest: Manifest | None = None
) -> Manifest | None:
    """Begins a run in a store, or continues the run that is there. Returns the manifest if it is finished.

    The caller has locked the store or a part of the run, unless it has a finished dataset. ``restart`` allows to remove
    a run that accepted no row. ``newest`` is the manifest of the newest version, if that is not the first.

    Raises:
        ConfigMismatchError: If the store has another run or other files.
    """
    manifest = newest or read_manifest(store)
    before = read_identity(store) if manifest is None else identity_of(manifest)
    if before is None:
        stray = [name for name in store.listing() if is_ours(name) and name != PROGRESS_DIR]
        before = read_identity(store)  # again: another part may have begun; it writes its record before its shards
        if stray and before is None:
            raise ConfigMismatchError(
                f"{store}: contains {some(stray)}, but no manifest and no record of the run that made them. "
                "Give --out an empty or new folder, or --overwrite to remove them."
            )
        if before is None and store.create(RUN_FILE, _record(identity)):
            return None
        before = read_identity(store) or {}
    changed = identity_changes(before, identity)
    if restart and _accepted_nothing(store, manifest, bool(changed)):
        clear_place(store)
        store.put(RUN_FILE, _record(identity))
        return None
    if changed:
        raise ConfigMismatchError(refusal(store, manifest is not None, changed, before, identity))
    return manifest


def rows_per_shard_in(store: Store) -> int | None:
    """Returns what a command without rows per shard uses: as the run or dataset in a store has it, else None."""
    manifest = read_manifest(store)
    identity = read_identity(store) if manifest is None else identity_of(manifest)
    found = {} if identity is None else identity.get("config", {}).get("options", {})
    number: int | None = found.get("rows_per_shard")
    return number


def read_identity(store: Store) -> dict[str, Any] | None:
    """Reads the identity of the unfinished run in a store; None if there is none."""
    try:
        return dict(json.loads(store.read(RUN_FILE)))
    except FileNotFoundError:
        return None
    except (RecursionError, TypeError, ValueError) as error:
        raise _no_record(store, RUN_FILE, error) from error


def _no_record(store: Store, name: str, error: Exception) -> DatasetFormatError:
    return DatasetFormatError(
        f"{store.path(name)}: is no record of a run: {error}. Restore it from a copy, or use --overwrite to start over."
    )


@contextmanager
def tidied(store: Store, lock: Lock) -> Iterator[None]:
    """Removes incomplete files before and after a run, and all progress files after the dataset is complete.

    The run has locked the store while no part is at work, so no other run uses the removed files.
    """
    store.tidy(PROGRESS_DIR)
    try:
        yield
    finally:
        # The error that ended the run is more useful. If another run took over, the files are that run's.
        with suppress(OSError, ResourceError, LockedError):
            lock.check()
            store.tidy(PROGRESS_DIR)
            if store.size(MANIFEST_NAME) is not None or store.size(RUN_FILE) is None:
                store.delete_folder(PROGRESS_DIR)


def _record(identity: Mapping[str, Any]) -> bytes:
    return json.dumps(identity, sort_keys=True).encode()


def identity_of(manifest: Manifest) -> dict[str, Any]:
    """Returns the identity of the run that made a finished dataset."""
    source = manifest.version.get("source", manifest.source)
    return {
        "config": manifest.config,
        "source": {name: value for name, value in source.items() if name != IMAGE_FILES},
        "tokenizer": tokenizer_identity(manifest.tokenizer),
    }


def _accepted_nothing(store: Store, manifest: Manifest | None, changed: bool) -> bool:
    """True if starting over loses nothing, because no row was accepted.

    A finished dataset without samples is recreated even with the same options, because the data that they refer to
    (files, URLs, installed packages) may have been corrected. An unfinished run with the same options is continued.
    """
    if manifest is not None:
        return manifest.totals.samples == 0 and not manifest.version
    if not changed:
        return False
    # A shard without its record may have samples.
    shards = {name.removesuffix(".tar") for name in store.listing() if SHARD_FILE.fullmatch(name)}
    records = [name for name in store.listing(PROGRESS_DIR) if _RECORD.fullmatch(name)]
    if not shards <= {name.removesuffix(".json") for name in records}:
        return False
    return all(_is_empty(content) for content in store.read_all(f"{PROGRESS_DIR}/{name}" for name in records))


def _is_empty(record: bytes) -> bool:
    try:
        return ShardRecord.from_json(record).info.samples == 0
    except (ValueError, KeyError, TypeError):  # perhaps of another version
        return False
