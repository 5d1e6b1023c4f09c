"""Opens the datasets of a loader, local or remote, and checks that they are compatible."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from vlmdata.errors import ConfigMismatchError, DatasetFormatError, ResourceError, UsageError
from vlmdata.format.atomic import atomic_path
from vlmdata.format.dataset import VlmDataset
from vlmdata.format.manifest import Manifest, ShardInfo
from vlmdata.format.schema import IMAGE_FILES, IMAGE_FILES_NAME, INDEX_NAME, LEDGER_NAME, MANIFEST_NAME, TOKENIZER_DIR
from vlmdata.format.tokenizer_files import tokenizer_file_names
from vlmdata.loader.config import DEFAULT_CAPACITY, Reading, Service
from vlmdata.locations import is_url, place_of
from vlmdata.packing.table import SampleTable, concatenate_tables, table_from_columns
from vlmdata.service.address import is_service
from vlmdata.storage.cache import RemoteShards, cache_folder
from vlmdata.storage.download import download
from vlmdata.storage.objects import ATOMIC
from vlmdata.storage.ranges import RemoteRanges
from vlmdata.storage.shards import DatasetShards, LocalShards, ShardFile, ShardSource

if TYPE_CHECKING:
    from vlmdata.service.client.servers import Servers

DEFAULT_CACHE_BYTES = Reading.cache_bytes
_SECONDS_TO_OPEN = 30.0
#: A host and a port, without a scheme.
_PORT = re.compile(r"^[\w.-]+:\d+$")


def open_for_loading(
    location: str | PathLike[str], cache_dir: Path | None, cache_bytes: int
) -> tuple[VlmDataset, DatasetShards]:
    """Opens a dataset's index and the source of its shards.

    Args:
        location: A folder, or any fsspec URL (``s3://…``, ``gs://…``, ``https://…``, ``memory://…``).
        cache_dir: Folder for remote shards.
        cache_bytes: Largest size of the cache in bytes.

    Raises:
        DatasetFormatError: If the dataset is missing or unfinished.
        ResourceError: If the cache cannot be written.
    """
    name = place_of(location)
    source: ShardSource
    if is_url(name):
        source = RemoteShards(name, cache_folder(cache_dir), cache_bytes)
        tables = fetch_tables(name, source.folder, partial(_download, name))
        opened, sound = (_Cached(opening) for opening in (source.open, source.open_sound))
        dataset = VlmDataset(tables, name=name, open_shard=opened, open_sound=sound)
    else:
        source, dataset = LocalShards(Path(name)), VlmDataset(name)
    return dataset, dataset_shards(name, dataset.manifest, source)


def locations_of(data: Any) -> list[str | PathLike[str]]:
    """Returns the locations that a user gave: one, or several of them.

    Raises:
        UsageError: If there are none, or anything else was given.
    """
    if isinstance(data, str | PathLike):
        return [data]
    found: list[str | PathLike[str]] = []
    for each in data if isinstance(data, Iterable) else [data]:
        if not isinstance(each, str | PathLike):  # an opened dataset yields samples: stop at the first
            raise UsageError(f"data is {data!r:.200}; it must be a folder, a URL, or a list of them")
        found.append(each)
    if not found:
        raise UsageError("data: no datasets given")
    return found


@dataclass(frozen=True, eq=False)
class OpenedData:
    """The data of a loader.

    Attributes:
        datasets: Manifest and index of each dataset.
        shards: Sources of their shards.
        servers: The collation service that makes the batches; None if this machine reads the shards.
    """

    datasets: tuple[VlmDataset, ...]
    shards: tuple[DatasetShards, ...]
    servers: Servers | None = None


def open_data(
    locations: Sequence[str | PathLike[str]],
    cache_dir: Path | None,
    cache_bytes: int,
    service: Service,
    timeout: float = _SECONDS_TO_OPEN,
) -> OpenedData:
    """Opens all data of a loader.

    Args:
        locations: Folders and fsspec URLs, or datasets of a collation service.
        cache_dir: Folder for remote shards.
        cache_bytes: Largest size of the cache in bytes.
        service: Options of a collation service.
        timeout: Seconds for such a service to answer.

    Raises:
        UsageError: If a service is mixed with other data.
        DatasetFormatError: If a dataset is missing or unfinished.
        ResourceError: If the cache cannot be written, or no server answers.
    """
    places = [place_of(location) for location in locations]
    if any(map(is_service, places)):
        if other := next((place for place in places if not is_service(place)), None):
            raise UsageError(f"{other}: cannot be mixed with a collation service; serve it, too (`vlmdata serve A B`)")
        from vlmdata.service.client.open import open_service  # gRPC is loaded on use

        servers, opened = open_service(places, cache_dir, service, timeout)
    else:
        if unnamed := next((place for place in places if _PORT.search(place) and not Path(place).exists()), None):
            raise UsageError(f"{unnamed}: no such directory. A collation service is grpc://{unnamed}")
        servers, opened = None, [open_for_loading(location, cache_dir, cache_bytes) for location in locations]
    return OpenedData(tuple(dataset for dataset, _ in opened), tuple(shards for _, shards in opened), servers)


def fetched_as_chosen(shards: Sequence[DatasetShards], reading: Reading, *, slices: bool) -> tuple[DatasetShards, ...]:
    """Decides for remote datasets between whole shards and byte ranges.

    Args:
        shards: All datasets of a loader.
        reading: The choice, and the size of the cache.
        slices: Whether only slices of packs are loaded.
    """
    size = sum(file.bytes for each in shards if isinstance(each.source, RemoteShards) for file in each.files)
    by_ranges = slices or size > reading.cache_bytes

    def fetched(each: DatasetShards) -> DatasetShards:
        if not isinstance(each.source, RemoteShards):
            return each
        object_store = each.source.url.partition("://")[0].lower() in ATOMIC  # other servers may not send ranges
        if reading.fetch == "ranges" or (reading.fetch == "auto" and by_ranges and object_store):
            return replace(each, source=RemoteRanges(each.source.url))
        return each

    return tuple(map(fetched, shards))


def shards_of(location: str | PathLike[str], manifest: Manifest) -> DatasetShards:
    """Where the shards of a dataset are read from, remote ones through the default cache."""
    name = place_of(location)
    source = RemoteShards(name, cache_folder(), DEFAULT_CACHE_BYTES) if is_url(name) else LocalShards(Path(name))
    return dataset_shards(name, manifest, source)


def dataset_shards(name: str, manifest: Manifest, source: ShardSource) -> DatasetShards:
    """Describes the shards of a dataset.

    Args:
        name: Location of the dataset, for messages.
        manifest: Its manifest.
        source: Source of the shards.
    """
    return DatasetShards(name, tuple(map(_shard_file, manifest.shards)), source, manifest.pixel_libraries)


def open_remote(url: str) -> VlmDataset:
    """Opens a dataset at a URL for random access. Downloads shards on first access, all other files now.

    Raises:
        DatasetFormatError: If the dataset is missing or unfinished, or a file does not match the manifest.
        ResourceError: If the cache cannot be written.
    """
    dataset, _ = open_for_loading(url, None, DEFAULT_CACHE_BYTES)
    manifest, directory = dataset.manifest, dataset.directory
    wanted: dict[str, str | None] = {LEDGER_NAME: manifest.ledger_sha256}
    if isinstance(recorded := manifest.source.get(IMAGE_FILES), Mapping):
        wanted[IMAGE_FILES_NAME] = str(recorded["sha256"])
    wanted |= {f"{TOKENIZER_DIR}/{name}": manifest.tokenizer_files.get(name) for name in tokenizer_file_names(manifest)}
    try:
        (directory / TOKENIZER_DIR).mkdir(exist_ok=True)
        for name, sha256 in wanted.items():
            if sha256 is None or not _has_sha256(directory / name, sha256):
                with suppress(FileNotFoundError), atomic_path(directory / name) as temporary:
                    download(f"{url}/{name}", temporary, sha256)
    except OSError as error:
        raise ResourceError(
            f"{directory}: cannot cache {url}: {error}. Set VLMDATA_CACHE to another folder."
        ) from error
    return dataset


@dataclass(frozen=True)
class _Cached:
    """Opens shards through the cache."""

    opening: Callable[[ShardFile], int]

    def __call__(self, info: ShardInfo) -> int:
        return self.opening(_shard_file(info))


def _shard_file(info: ShardInfo) -> ShardFile:
    return ShardFile(info.name, info.bytes, info.sha256)


#: Fetches a file of a dataset: its name, the local path, and the expected sha256, if known.
type FetchFile = Callable[[str, Path, str | None], None]


def _download(url: str, name: str, to: Path, sha256: str | None) -> None:
    download(f"{url}/{name}", to, sha256)


def fetch_tables(url: str, cache: Path, fetch: FetchFile) -> Path:
    """Fetches manifest and index into a cache. Always fetches the manifest again, to detect a changed dataset.

    Args:
        url: Place of the dataset, for messages.
        cache: The cache's own folder; see :func:`vlmdata.storage.cache.cache_folder`.
        fetch: Fetches a file.

    Returns:
        Folder with both.

    Raises:
        DatasetFormatError: If the dataset is unfinished, or a file does not match the manifest.
        ResourceError: If the cache cannot be written.
    """
    datasets = cache / "datasets"
    name = MANIFEST_NAME
    try:
        datasets.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=datasets) as folder:
            fetch(name, Path(folder) / name, None)
            try:
                manifest = Manifest.read(Path(folder))
            except DatasetFormatError as error:
                raise DatasetFormatError(f"{url}: {error}") from error
            # By content: a reader of a dataset that is being replaced gets one consistent state, or an error.
            directory = datasets / manifest.fingerprint[:32]
            directory.mkdir(exist_ok=True)
            os.replace(Path(folder) / name, directory / name)
        name = INDEX_NAME
        if not _has_sha256(directory / name, manifest.index_sha256):
            with atomic_path(directory / name) as temporary:
                fetch(name, temporary, manifest.index_sha256)
    except FileNotFoundError:
        raise DatasetFormatError(f"{url}: has no {name}, so it is not a finished vlmdata dataset") from None
    except OSError as error:
        raise ResourceError(f"{cache}: cannot cache the index of {url}: {error}. Set another cache_dir.") from error
    return directory


def _has_sha256(path: Path, sha256: str) -> bool:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except FileNotFoundError:
        return False


def require_one_tokenizer(datasets: Sequence[VlmDataset]) -> None:
    """Raises an error for datasets with different token ids or pixel formats.

    Raises:
        ConfigMismatchError: Naming both datasets.
    """
    first = datasets[0]
    for other in datasets[1:]:
        a, b = first.manifest.tokenizer, other.manifest.tokenizer
        if (a.fingerprint, a.pad, a.image) != (b.fingerprint, b.pad, b.image):
            raise ConfigMismatchError(
                f"datasets with different tokenizers cannot be mixed: {first.name} has {a.name} "
                f"({a.fingerprint[:16]}), {other.name} has {b.name} ({b.fingerprint[:16]}). "
                "Preprocess one of them again with the other's tokenizer."
            )
        if first.family != other.family:
            raise ConfigMismatchError(
                f"datasets of different model families cannot be mixed: {first.name} is for "
                f"{first.family.name}, {other.name} is for {other.family.name}. Preprocess one of them again with "
                "the other's --family."
            )


def sample_table(datasets: Sequence[VlmDataset]) -> SampleTable:
    """Concatenates the planner columns of all datasets.

    Raises:
        DatasetFormatError: If a dataset has no samples.
    """
    for dataset in datasets:
        if len(dataset) == 0:
            raise DatasetFormatError(f"{dataset.name}: has no samples (all rows were rejected?)")
    tables = []
    for dataset in datasets:
        index = dataset.index
        tables.append(
            table_from_columns(
                index.lengths, index.num_targets, index.grids, index.grid_offsets, np.asarray(index.shard)
            )
        )
    return concatenate_tables(tables)


def default_capacity(datasets: Sequence[VlmDataset]) -> int:
    """Returns the default capacity: 8,192 tokens, or the longest sample rounded up to a multiple of 1,024.

    Raises:
        DatasetFormatError: If there are no samples.
    """
    longest = max((int(np.max(dataset.index.lengths, initial=0)) for dataset in datasets), default=0)
    if longest == 0:
        raise DatasetFormatError(f"{datasets[0].name}: has no samples (all rows were rejected?)")
    return max(DEFAULT_CAPACITY, -(-longest // 1024) * 1024)
