"""Auditing a dataset at a URL: its small files are fetched first, its shards one after another."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory

from vlmdata.errors import DatasetFormatError, ResourceError
from vlmdata.format.dataset import OpenShard
from vlmdata.format.manifest import Manifest, ShardInfo
from vlmdata.format.schema import INDEX_NAME, LEDGER_NAME, MANIFEST_NAME, TOKENIZER_DIR
from vlmdata.format.tokenizer_files import tokenizer_file_names
from vlmdata.loader.open import default_cache_dir
from vlmdata.loader.remote import download
from vlmdata.locations import is_url, place_of
from vlmdata.verify.dataset import Audit
from vlmdata.verify.fault import Fault


@dataclass(frozen=True)
class FetchedShards:
    """Opens shards of a URL as they are there now: what a loader has cached would prove nothing.

    Attributes:
        url: The dataset's URL.
        folder: Where a shard lies while it is audited.
    """

    url: str
    folder: Path

    def __call__(self, info: ShardInfo) -> int:
        """Fetches a shard; its file has no name and goes when it is closed.

        Raises:
            FileNotFoundError: If there is no such remote file.
            DatasetFormatError: If it cannot be fetched.
        """
        with NamedTemporaryFile(dir=self.folder) as file:
            download(f"{self.url}/{info.name}", Path(file.name), None)
            return os.open(file.name, os.O_RDONLY | os.O_CLOEXEC)


@contextmanager
def auditable(location: str | PathLike[str]) -> Iterator[tuple[Path, OpenShard | None]]:
    """A dataset's folder, or one that holds the small files of a dataset at a URL, and what opens its shards.

    Args:
        location: A folder or fsspec URL.

    Yields:
        The folder, and for a URL the function that fetches and opens a shard.

    Raises:
        DatasetFormatError: If there is no manifest at the URL, or a file cannot be fetched.
        ResourceError: If there is no room for them.
    """
    place = place_of(location)
    if not is_url(place):
        yield Path(place), None
        return
    cache = default_cache_dir()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        holder = TemporaryDirectory(dir=cache)
    except OSError as error:
        raise ResourceError(f"{cache}: cannot be written: {error}. Set VLMDATA_CACHE to another folder.") from error
    with holder as name:
        folder = Path(name)
        _fetch_small_files(place, folder)
        yield folder, FetchedShards(place, folder)


def named(audit: Audit, directory: Path, place: str) -> Audit:
    """The audit with messages that name the dataset as the user did, not the folder that was audited."""
    faults = [replace(fault, message=fault.message.replace(str(directory), place)) for fault in audit.faults]
    return replace(audit, faults=faults)


def remedies_at(url: str, faults: Iterable[Fault]) -> list[str]:
    """What mends a dataset at a URL: ``vlmdata preprocess`` cannot write there."""
    return [f"Copy the dataset to {url} again, from a copy that `vlmdata verify` finds sound."] if list(faults) else []


def _fetch_small_files(url: str, folder: Path) -> None:
    (folder / TOKENIZER_DIR).mkdir()
    try:
        download(f"{url}/{MANIFEST_NAME}", folder / MANIFEST_NAME, None)
    except FileNotFoundError:
        raise DatasetFormatError(f"{url}: holds no {MANIFEST_NAME}, so it is not a vlmdata dataset") from None
    try:
        manifest = Manifest.read(folder)
    except DatasetFormatError as error:
        raise DatasetFormatError(f"{url}: {error}") from error
    for name in (INDEX_NAME, LEDGER_NAME, *(f"{TOKENIZER_DIR}/{name}" for name in tokenizer_file_names(manifest))):
        try:
            download(f"{url}/{name}", folder / name, None)
        except FileNotFoundError:  # a fault that the audit will find
            with suppress(FileNotFoundError):
                (folder / name).unlink()
