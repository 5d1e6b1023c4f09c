"""The audit of a dataset at a URL: downloads its small files first, then shard after shard."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory

from vlmdata.errors import DatasetFormatError, ResourceError
from vlmdata.format.manifest import Manifest, ShardInfo
from vlmdata.format.schema import MANIFEST_NAME, TOKENIZER_DIR
from vlmdata.format.tokenizer_files import STRAY, tokenizer_file_names
from vlmdata.locations import file_system, is_url, place_of, within
from vlmdata.storage.cache import cache_folder
from vlmdata.storage.download import download
from vlmdata.storage.objects import ATOMIC
from vlmdata.verify.dataset import Audit
from vlmdata.verify.fault import Fault, remedies


@dataclass(frozen=True)
class FetchedShards:
    """Opens the current shards of a URL. It ignores the loader's cache, which would prove nothing."""

    url: str  # the dataset's URL
    folder: Path  # folder for a shard during its audit

    def names(self) -> list[str]:
        """Lists the files at the URL and in its tokenizer folder, sorted. Empty for a web address: it has no lists.

        Raises:
            ResourceError: If the file system does not list them.
        """
        if self.url.startswith(("http://", "https://")):
            return []
        try:
            files, root = file_system(self.url)
            files.invalidate_cache()
            found = [path.rstrip("/").rpartition("/")[2] for path in files.ls(root, detail=False)]
            folder = f"{root.rstrip('/')}/{TOKENIZER_DIR}/"
            inner = files.find(folder) if TOKENIZER_DIR in found else []
            return sorted([*found, *(f"{TOKENIZER_DIR}/{path.removeprefix(folder)}" for path in inner)])
        except Exception as error:  # each file system raises its own types
            raise ResourceError(f"{self.url}: cannot be listed: {type(error).__name__}: {error}") from error

    def __call__(self, info: ShardInfo) -> int:
        """Downloads a shard to an unnamed file, which disappears when closed.

        Raises:
            FileNotFoundError: If the remote file does not exist.
            DatasetFormatError: If the download fails.
        """
        with NamedTemporaryFile(dir=self.folder) as file:
            download(within(self.url, info.name), Path(file.name), None)
            return os.open(file.name, os.O_RDONLY | os.O_CLOEXEC)


@contextmanager
def auditable(location: str | PathLike[str]) -> Iterator[tuple[Path, FetchedShards | None]]:
    """Provides a folder to audit and a function that opens its shards. For a URL, downloads the small files.

    Yields:
        The folder, and for a URL the function that downloads and opens a shard.

    Raises:
        DatasetFormatError: If there is no manifest at the URL, or a download fails.
        ResourceError: If there is no space for the files.
    """
    place = place_of(location)
    if not is_url(place):
        yield Path(place), None
        return
    cache = cache_folder()
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
    """Replaces the audited folder by the user's location in the messages of an audit."""
    faults = [replace(fault, message=fault.message.replace(str(directory), place)) for fault in audit.faults]
    return replace(audit, faults=faults)


def remedies_at(
    url: str, faults: Iterable[Fault], joined: bool = False, selected: bool = False, version: bool = False
) -> list[str]:
    """Returns how to repair a dataset at a URL: as in a folder where preprocess can write, else by a new copy."""
    if url.partition("://")[0].lower() in ATOMIC:
        return remedies(url, faults, joined, selected, version)
    found = list(faults)
    strays = [fault for fault in found if fault.check == STRAY]
    copied = f"Copy the dataset to {url} again, from a copy without faults in `vlmdata verify`."
    return remedies(url, strays) + ([copied] if len(found) > len(strays) else [])


def _fetch_small_files(url: str, folder: Path) -> None:
    (folder / TOKENIZER_DIR).mkdir()
    try:
        download(f"{url}/{MANIFEST_NAME}", folder / MANIFEST_NAME, None)
    except FileNotFoundError:
        raise DatasetFormatError(f"{url}: has no {MANIFEST_NAME}, so it is not a vlmdata dataset") from None
    try:
        manifest = Manifest.read(folder)
    except DatasetFormatError as error:
        raise DatasetFormatError(f"{url}: {error}") from error
    for name in (*manifest.small_files, *(f"{TOKENIZER_DIR}/{name}" for name in tokenizer_file_names(manifest))):
        try:
            download(f"{url}/{name}", folder / name, None)
        except FileNotFoundError:  # the audit reports this fault
            with suppress(FileNotFoundError):
                (folder / name).unlink()
