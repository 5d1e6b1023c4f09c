"""Removes old versions of a dataset: their tables, and the shards that no other version has.

The list of versions is written first, so a version is there whole or not at all. What a killed command leaves, the same
command removes. Of the first version, the manifest stays: it marks the folder as a dataset.
"""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from vlmdata.errors import ResourceError, UsageError
from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import (
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
from vlmdata.storage.base import Lock, LockedError, Store
from vlmdata.storage.linked import manifest_of
from vlmdata.storage.versions import Version, folder_of, store_of_version, versions_in, versions_to_json

_LOCK = f"{PROGRESS_DIR}/lock"
_TABLES = (INDEX_NAME, LEDGER_NAME, ROWS_NAME, IMAGE_FILES_NAME)


@dataclass(frozen=True)
class PrunePlan:
    """What a prune removes.

    Attributes:
        removed: Versions that are removed from the list.
        left: Versions that stay.
        files: Bytes of each file that is removed, by name in the dataset, without tokenizers.
        folders: Folders of versions that are removed.
    """

    removed: tuple[Version, ...]
    left: tuple[Version, ...]
    files: Mapping[str, int]
    folders: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())


def listed_versions(store: Store) -> tuple[Version, ...]:
    """Returns the versions of a dataset, oldest first, also if there is only the first.

    Raises:
        DatasetFormatError: If it is no finished dataset, or the list is damaged.
    """
    return versions_in(store) or (Version(1, manifest_of(store).fingerprint),)


def plan_prune(store: Store, numbers: Collection[int]) -> PrunePlan:
    """Returns what is to be removed with some versions. Changes nothing.

    Args:
        store: The dataset.
        numbers: The versions. One that was pruned before is none to remove, but what is left of it is.

    Raises:
        UsageError: If one is the newest, or there was never such a version.
        DatasetFormatError: If the dataset is damaged.
    """
    versions = listed_versions(store)
    newest = versions[-1].number
    for number in numbers:
        if number == newest:
            raise UsageError(f"{store}: version {number} is the newest, which is not pruned.")
        if not 1 <= number < newest:
            raise UsageError(f"{store}: has no version {number}. It has {', '.join(str(v.number) for v in versions)}.")
    left = tuple(each for each in versions if each.number not in numbers)
    manifests = {each.folder: manifest_of(store_of_version(store, each.number)) for each in left}
    needed = {name for folder, manifest in manifests.items() for name in _shards(folder, manifest)}
    gone = [number for number in range(1, newest) if number not in {each.number for each in left}]
    files = {name: size for number in gone for name, size in _files(store, number) if name not in needed}
    standing = store.listing(VERSIONS_DIR)
    folders = tuple(folder_of(number) for number in gone if number > 1 and str(number) in standing)
    return PrunePlan(tuple(each for each in versions if each.number in numbers), left, files, folders)


def prune(store: Store, numbers: Collection[int]) -> PrunePlan:
    """Removes versions; arguments and errors as of :func:`plan_prune`. Returns what was removed.

    Raises:
        ResourceError: If another command is at work in the dataset, or files cannot be removed.
    """
    with _locked(store) as lock:
        plan = plan_prune(store, numbers)
        if plan.removed:
            lock.commit(VERSIONS_NAME, versions_to_json(plan.left))
        manifests = [f"{folder}/{MANIFEST_NAME}" for folder in plan.folders]
        store.delete([name for name in plan.files if name not in manifests])
        for folder in plan.folders:
            store.delete_folder(f"{folder}/{TOKENIZER_DIR}")
            if not any(size is not None for name, size in store.listing(folder).items() if name != MANIFEST_NAME):
                store.delete_folder(folder)
        store.delete(manifests)
    return plan


def _shards(folder: str, manifest: Manifest) -> Iterator[str]:
    """Yields the names in the dataset of the shards of a version."""
    for info in manifest.shards:
        yield posixpath.normpath(posixpath.join(folder, info.name))


def _files(store: Store, number: int) -> Iterator[tuple[str, int]]:
    """Yields the files of a version in its own folder: names in the dataset, and bytes."""
    folder = folder_of(number)
    tables = (*_TABLES, MANIFEST_NAME) if folder else _TABLES
    for name, size in store.listing(folder).items():
        if size is not None and (name in tables or name.startswith("shard-")):
            yield posixpath.join(folder, name), size


@contextmanager
def _locked(store: Store) -> Iterator[Lock]:
    try:
        store.prepare(PROGRESS_DIR)
        with store.lock(_LOCK) as lock:
            yield lock
            store.delete_folder(PROGRESS_DIR)
    except LockedError as error:
        raise ResourceError(f"{store}: another command is at work there {error.holder}".rstrip()) from None
    except OSError as error:
        raise ResourceError(
            f"{store}: versions cannot be removed: {error}. Fix permissions, and run the same command again."
        ) from error
