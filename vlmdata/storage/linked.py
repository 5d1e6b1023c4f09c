"""Datasets made of the shards of others: what ``vlmdata join`` and ``vlmdata select`` have in common.

Shards come first and the manifest last, so a command that is killed leaves no dataset. The same command goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vlmdata.errors import ConfigMismatchError, DatasetFormatError, ResourceError
from vlmdata.format.manifest import Manifest, ShardInfo
from vlmdata.format.schema import MANIFEST_NAME, PROGRESS_DIR, TOKENIZER_DIR
from vlmdata.format.selection import Selection
from vlmdata.locations import is_url
from vlmdata.storage.base import Lock, LockedError, Store
from vlmdata.storage.folder import Folder
from vlmdata.storage.transfer import How, transfer
from vlmdata.wording import counted

_LOCK = f"{PROGRESS_DIR}/lock"


@dataclass(frozen=True)
class Making:
    """What a command makes, for its record of an unfinished run and its messages."""

    noun: str  # "join" or "selection"
    doing: str  # "joining" or "selecting"
    of: str  # "of other datasets": what another one is
    plan: bytes  # equal if and only if the result is

    @property
    def record(self) -> str:
        """Name of the file with the plan while a run is unfinished."""
        return f"{PROGRESS_DIR}/{self.noun}.json"


@contextmanager
def made_in(out: Store, making: Making) -> Iterator[Lock]:
    """Locks ``out`` while the dataset is made and closed there; then removes the records.

    Raises:
        ConfigMismatchError: If ``out`` has other contents than an unfinished run of the same plan.
        ResourceError: If the disk is full, or another command is at work in ``out``.
    """
    try:
        out.prepare(PROGRESS_DIR, TOKENIZER_DIR)
        with out.lock(_LOCK) as lock:
            _begin(out, making)
            yield lock
            out.tidy(PROGRESS_DIR)
            out.delete_folder(PROGRESS_DIR)
    except LockedError as error:
        raise ResourceError(f"{out}: another command is at work there {error.holder}".rstrip()) from None
    except OSError as error:
        raise ResourceError(
            f"{out}: {making.doing} failed: {error}. Free space or fix permissions, and run the same command again."
        ) from error


def _begin(out: Store, making: Making) -> None:
    """Checks that ``out`` is empty or has an unfinished run of the same plan, and records the plan."""
    try:
        if out.read(making.record) == making.plan:
            return
        state = f"an unfinished {making.noun} {making.of}"
    except FileNotFoundError:
        names = [name for name in out.listing() if name not in (PROGRESS_DIR, TOKENIZER_DIR)]
        if not names:
            out.put(making.record, making.plan)
            return
        state = ", ".join(sorted(names)[:5])
    raise ConfigMismatchError(f"{out}: has {state}. Give an empty or new folder as --out.")


@dataclass(frozen=True)
class TakenShard:
    """A shard of another dataset, and its name in the new one."""

    store: Store  # where it is
    info: ShardInfo  # what it is there
    name: str  # its name in the new dataset


def take_shards(shards: Sequence[TakenShard], out: Store, on_shard: Callable[[int, int], None]) -> Counter[How]:
    """Gives ``out`` the shards: hard links within a file system, otherwise copies.

    Args:
        shards: The shards.
        out: The new dataset.
        on_shard: Called with the number of transferred shards and of all shards.

    Returns:
        Number of shards by the way they were transferred.

    Raises:
        ResourceError: If one does not have the size of its manifest.
        OSError: If a folder has no such file, no room or no permission.
    """
    transferred = Counter[How]()
    for shard in shards:
        linked = isinstance(shard.store, Folder) and shard.store.is_link(shard.info.name)
        if linked and shard.store.sha256(shard.info.name) != shard.info.sha256:
            raise DatasetFormatError(
                f"{shard.store.path(shard.info.name)}: is a link to a file that is not the shard: its sha256 is not "
                "that of the manifest. Replace the link by the shard."
            )
        transferred[transfer(shard.store, shard.info.name, out, shard.name)] += 1
        if (size := out.size(shard.name)) != shard.info.bytes:
            raise ResourceError(
                f"{out.path(shard.name)}: {size} bytes, but {shard.store.path(shard.info.name)} must have "
                f"{shard.info.bytes}. Run `vlmdata verify {shard.store}`."
            )
        on_shard(transferred.total(), len(shards))
    return transferred


def manifest_of(store: Store) -> Manifest:
    """Reads the manifest of a dataset.

    Raises:
        DatasetFormatError: If there is none, or it is damaged.
    """
    if not is_url(str(store)):
        return Manifest.read(Path(str(store)))
    try:
        return Manifest.from_json(store.read(MANIFEST_NAME), store.path(MANIFEST_NAME))
    except FileNotFoundError:
        raise DatasetFormatError(f"{store}: has no {MANIFEST_NAME}, so it is not a vlmdata dataset") from None


def row_numbers(manifest: Manifest) -> int:
    """Returns how many row numbers the source of a dataset has: above its rows if it has a part of them."""
    selection = Selection.read(manifest.source)
    return manifest.totals.rows if selection is None else selection.of_rows


def describe(transferred: Mapping[How, int]) -> str:
    """Describes a transfer in words: ``24 shards: hard links``."""
    return ", ".join(f"{counted(count, 'shard')}: {how}" for how, count in transferred.items())
