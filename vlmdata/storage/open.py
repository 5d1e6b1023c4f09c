"""Opens datasets wherever they lie: in a folder, or at a URL, through the cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory

from vlmdata.errors import DatasetFormatError, ResourceError
from vlmdata.format.atomic import atomic_path
from vlmdata.format.dataset import VlmDataset
from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import INDEX_NAME, MANIFEST_NAME, TOKENIZER_DIR
from vlmdata.format.tokenizer_files import tokenizer_file_names
from vlmdata.format.writing import sha256_of
from vlmdata.locations import is_url, place_of
from vlmdata.storage.cache import RemoteShards, cache_folder
from vlmdata.storage.choices import DEFAULT_CACHE_BYTES, Fetch
from vlmdata.storage.download import RemoteRanges, download
from vlmdata.storage.objects import ATOMIC
from vlmdata.storage.shards import DatasetShards, LocalShards, ShardSource
from vlmdata.storage.versions import place_of_version, split_version


def open_dataset(location: str | PathLike[str], *, version: int | None = None) -> VlmDataset:
    """Opens a dataset for random access.

    Args:
        location: The folder that ``vlmdata preprocess --out`` wrote, or an fsspec URL of it (``s3://…``). Shards of a
            URL are downloaded into the cache (``$VLMDATA_CACHE``) on first access. ``DIR@2`` names a version.
        version: Number of the version; None opens the newest, unless the location names one.

    Returns:
        The dataset; ``dataset[i]`` is a :class:`Sample`, ``dataset.index`` its columns.

    Raises:
        DatasetFormatError: If the location is not a finished vlmdata dataset, or needs a newer reader.
        UsageError: If it has no such version.
    """
    if is_url(place_of(location)):
        return open_remote(place_of(location), version)
    files = place_of_version(location, version)
    return VlmDataset(files, name=_shown(location, version, files))


def open_for_loading(
    location: str | PathLike[str], cache_dir: Path | None, cache_bytes: int
) -> tuple[VlmDataset, DatasetShards]:
    """Opens a dataset's index and the source of its shards, at a folder or any fsspec URL.

    ``cache_dir`` holds remote shards, up to ``cache_bytes``.

    Raises:
        DatasetFormatError: If the dataset is missing or unfinished.
        ResourceError: If the cache cannot be written.
    """
    files = place_of_version(location)
    return _opened(_shown(location, None, files), files, cache_dir, cache_bytes)


def _opened(name: str, files: str, cache_dir: Path | None, cache_bytes: int) -> tuple[VlmDataset, DatasetShards]:
    source: ShardSource
    if is_url(name):
        source = RemoteShards(files, cache_folder(cache_dir), cache_bytes)
        tables = fetch_tables(name, source.folder, partial(_download, files))
        dataset = VlmDataset(tables, name=name, open_shard=source.open, open_sound=source.open_sound)
    else:
        source, dataset = LocalShards(Path(files)), VlmDataset(files, name=name)
    return dataset, DatasetShards.of(name, dataset.manifest, source)


def _shown(location: str | PathLike[str], version: int | None, files: str) -> str:
    """Returns the name of a dataset: as the user gave it, or the folder of the version that was meant.

    Given again, the name of a version means the same version, also when there is a newer one.
    """
    place = split_version(location)[0]
    if files != place:
        return files
    return place_of(location) if version is None else f"{place}@{version}"


def fetched_as_chosen(
    shards: Sequence[DatasetShards], fetch: Fetch, cache_bytes: int, *, slices: bool
) -> tuple[DatasetShards, ...]:
    """Decides for the remote datasets of a loader between whole shards and byte ranges.

    "auto" takes byte ranges if only slices of packs are loaded, and for data larger than the cache.
    """
    size = sum(file.bytes for each in shards if isinstance(each.source, RemoteShards) for file in each.files)
    by_ranges = slices or size > cache_bytes

    def chosen(each: DatasetShards) -> DatasetShards:
        if not isinstance(each.source, RemoteShards):
            return each
        object_store = each.source.url.partition("://")[0].lower() in ATOMIC  # other servers may not send ranges
        if fetch == "ranges" or (fetch == "auto" and by_ranges and object_store):
            return replace(each, source=RemoteRanges(each.source.url))
        return each

    return tuple(map(chosen, shards))


def shards_of(location: str | PathLike[str], manifest: Manifest) -> DatasetShards:
    """Returns the shards of a dataset whose files are there, remote ones read through the default cache."""
    name = place_of(location)
    source = RemoteShards(name, cache_folder(), DEFAULT_CACHE_BYTES) if is_url(name) else LocalShards(Path(name))
    return DatasetShards.of(name, manifest, source)


def open_remote(location: str, version: int | None = None) -> VlmDataset:
    """Opens a dataset at a URL for random access. Downloads shards on first access, all other files now.

    Raises:
        DatasetFormatError: If the dataset is missing or unfinished, or a file does not match the manifest.
        ResourceError: If the cache cannot be written.
    """
    url = place_of_version(location, version)
    dataset, _ = _opened(_shown(location, version, url), url, None, DEFAULT_CACHE_BYTES)
    manifest, directory = dataset.manifest, dataset.directory
    wanted: dict[str, str | None] = {**manifest.small_files}
    del wanted[INDEX_NAME]  # which is there
    wanted |= {f"{TOKENIZER_DIR}/{name}": manifest.tokenizer_files.get(name) for name in tokenizer_file_names(manifest)}
    try:
        (directory / TOKENIZER_DIR).mkdir(exist_ok=True)
        for name, sha256 in wanted.items():
            if sha256 is None or sha256_of(directory / name) != sha256:
                with suppress(FileNotFoundError), atomic_path(directory / name) as temporary:
                    download(f"{url}/{name}", temporary, sha256)
    except OSError as error:
        raise ResourceError(
            f"{directory}: cannot cache {url}: {error}. Set VLMDATA_CACHE to another folder."
        ) from error
    return dataset


#: Fetches a file of a dataset: its name, the local path, and the expected sha256, if known.
type FetchFile = Callable[[str, Path, str | None], None]


def _download(url: str, name: str, to: Path, sha256: str | None) -> None:
    download(f"{url}/{name}", to, sha256)


def fetch_tables(url: str, cache: Path, fetch: FetchFile) -> Path:
    """Fetches manifest and index into the cache's own folder, and returns the folder with both.

    Always fetches the manifest again, to detect a changed dataset. ``url`` names it in messages.

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
        if sha256_of(directory / name) != manifest.index_sha256:
            with atomic_path(directory / name) as temporary:
                fetch(name, temporary, manifest.index_sha256)
    except FileNotFoundError:
        raise DatasetFormatError(f"{url}: has no {name}, so it is not a finished vlmdata dataset") from None
    except OSError as error:
        raise ResourceError(f"{cache}: cannot cache the index of {url}: {error}. Set another cache_dir.") from error
    return directory
