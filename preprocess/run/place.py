"""Creates and clears the output of a run, for all commands that make datasets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from preprocess.engines.base import system_message
from preprocess.shards.job import RUN_FILE
from vlmdata.errors import ConfigMismatchError, ResourceError
from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import IMAGE_FILES_NAME, INDEX_NAME, LEDGER_NAME, MANIFEST_NAME, PROGRESS_DIR, TOKENIZER_DIR
from vlmdata.storage import Store

#: The lock of a whole run.
LOCK_FILE = f"{PROGRESS_DIR}/lock"
#: Names of shards.
SHARD_FILE = re.compile(r"shard-\d{6,}\.tar")


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
    fixed = (MANIFEST_NAME, INDEX_NAME, LEDGER_NAME, IMAGE_FILES_NAME, TOKENIZER_DIR, PROGRESS_DIR)
    return name in fixed or SHARD_FILE.fullmatch(name) is not None


def clear_place(store: Store) -> None:
    """Removes a dataset and the remains of unfinished runs. Files of others beside them stay."""
    # The manifest goes first: without it, nothing treats the rest as a dataset. The record of the run goes last: while
    # anything is left of an unfinished run, no run of another configuration can mistake it for its own.
    store.delete([MANIFEST_NAME])
    ours = [name for name in store.listing() if is_ours(store.final_name(name)) and name != PROGRESS_DIR]
    store.delete(name for name in ours if store.final_name(name) != TOKENIZER_DIR)
    for name in ours:
        if store.final_name(name) == TOKENIZER_DIR:
            store.delete_folder(name)
    store.delete_folder(PROGRESS_DIR, keep=[name.rpartition("/")[2] for name in (LOCK_FILE, RUN_FILE)])
    store.delete([RUN_FILE])


def read_manifest(store: Store) -> Manifest | None:
    """Reads the manifest of a finished dataset; None if there is none."""
    try:
        return Manifest.from_json(store.read(MANIFEST_NAME), store.path(MANIFEST_NAME))
    except FileNotFoundError:
        return None
