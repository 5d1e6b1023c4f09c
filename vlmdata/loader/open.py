"""Opening the datasets of a loader, wherever they lie, and making sure they belong together."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from vlmdata.errors import ConfigMismatchError, DatasetFormatError, ResourceError
from vlmdata.format.atomic import atomic_path
from vlmdata.format.dataset import VlmDataset
from vlmdata.format.manifest import Manifest, ShardInfo
from vlmdata.format.schema import INDEX_NAME, LEDGER_NAME, MANIFEST_NAME, TOKENIZER_DIR
from vlmdata.format.tokenizer_files import tokenizer_file_names
from vlmdata.loader.cache import RemoteShards
from vlmdata.loader.config import DEFAULT_CAPACITY, Reading
from vlmdata.loader.remote import download
from vlmdata.loader.shards import DatasetShards, LocalShards, ShardFile, ShardSource
from vlmdata.locations import is_url, place_of
from vlmdata.packing.table import SampleTable, concatenate_tables, table_from_columns

DEFAULT_CACHE_BYTES = Reading.cache_bytes


def default_cache_dir() -> Path:
    """Where remote shards are cached unless told otherwise: in ``$VLMDATA_CACHE``, else the user's cache folder."""
    from platformdirs import user_cache_path

    return Path(os.environ.get("VLMDATA_CACHE") or user_cache_path("vlmdata")) / "shards"


def open_for_loading(
    location: str | PathLike[str], cache_dir: Path | None, cache_bytes: int
) -> tuple[VlmDataset, DatasetShards]:
    """A dataset's index, and where its shards are read from.

    Args:
        location: A folder, or any fsspec URL (``s3://…``, ``gs://…``, ``https://…``, ``memory://…``).
        cache_dir: Folder for remote shards.
        cache_bytes: Most bytes kept there.

    Raises:
        DatasetFormatError: If there is no finished dataset.
        ResourceError: If the cache cannot be written.
    """
    name = place_of(location)
    source: ShardSource
    if is_url(name):
        source = RemoteShards(name, cache_dir or default_cache_dir(), cache_bytes)
        dataset = VlmDataset(_fetch_tables(name, source.cache_dir), name=name, open_shard=_Cached(source))
    else:
        source, dataset = LocalShards(Path(name)), VlmDataset(name)
    return dataset, DatasetShards(name, tuple(map(_shard_file, dataset.manifest.shards)), source)


def open_remote(url: str) -> VlmDataset:
    """Opens a dataset at a URL for random access: all but its shards is fetched now, they when they are touched.

    Raises:
        DatasetFormatError: If there is no finished dataset, or a file is not the one that the manifest describes.
        ResourceError: If the cache cannot be written.
    """
    dataset, _ = open_for_loading(url, None, DEFAULT_CACHE_BYTES)
    manifest, directory = dataset.manifest, dataset.directory
    wanted: dict[str, str | None] = {LEDGER_NAME: manifest.ledger_sha256}
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

    source: RemoteShards

    def __call__(self, info: ShardInfo) -> int:
        return self.source.open(_shard_file(info))


def _shard_file(info: ShardInfo) -> ShardFile:
    return ShardFile(info.name, info.bytes, info.sha256)


def _fetch_tables(url: str, cache: Path) -> Path:
    """Brings manifest and index here. The manifest is always fetched anew, so that a changed dataset is seen."""
    datasets = cache / "datasets"
    name = MANIFEST_NAME
    try:
        datasets.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=datasets) as folder:
            download(f"{url}/{name}", Path(folder) / name, None)
            try:
                manifest = Manifest.read(Path(folder))
            except DatasetFormatError as error:
                raise DatasetFormatError(f"{url}: {error}") from error
            # By content: whoever meets a dataset while it is being replaced has one whole state of it, or an error.
            directory = datasets / manifest.fingerprint[:32]
            directory.mkdir(exist_ok=True)
            os.replace(Path(folder) / name, directory / name)
        name = INDEX_NAME
        if not _has_sha256(directory / name, manifest.index_sha256):
            with atomic_path(directory / name) as temporary:
                download(f"{url}/{name}", temporary, manifest.index_sha256)
    except FileNotFoundError:
        raise DatasetFormatError(f"{url}: holds no {name}, so it is not a finished vlmdata dataset") from None
    except OSError as error:
        raise ResourceError(f"{cache}: cannot cache the index of {url}: {error}. Give another cache_dir.") from error
    return directory


def _has_sha256(path: Path, sha256: str) -> bool:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except FileNotFoundError:
        return False


def require_one_tokenizer(datasets: Sequence[VlmDataset]) -> None:
    """Refuses to mix datasets whose token ids or pixels mean different things.

    Raises:
        ConfigMismatchError: Naming both.
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
                f"datasets of different model families cannot be mixed: {first.name} is made for "
                f"{first.family.name}, {other.name} for {other.family.name}. Preprocess one of them again with "
                "the other's --family."
            )


def sample_table(datasets: Sequence[VlmDataset]) -> SampleTable:
    """The planner's columns of all datasets, one after another.

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
    """The capacity if none is given: 8,192 tokens, or the longest sample rounded up to a multiple of 1,024.

    Raises:
        DatasetFormatError: If there is no sample.
    """
    longest = max((int(np.max(dataset.index.lengths, initial=0)) for dataset in datasets), default=0)
    if longest == 0:
        raise DatasetFormatError(f"{datasets[0].name}: has no samples (all rows were rejected?)")
    return max(DEFAULT_CAPACITY, -(-longest // 1024) * 1024)
