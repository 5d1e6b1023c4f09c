"""Opening the datasets of a loader, wherever they lie, and making sure they belong together."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike, fspath
from pathlib import Path

import numpy as np

from vlmdata.errors import ConfigMismatchError, DatasetFormatError
from vlmdata.format.dataset import VlmDataset
from vlmdata.format.schema import INDEX_NAME, MANIFEST_NAME
from vlmdata.loader.cache import RemoteShards
from vlmdata.loader.shards import DatasetShards, LocalShards, ShardFile
from vlmdata.packing.table import SampleTable, concatenate_tables, table_from_columns

DEFAULT_CACHE_BYTES = 100 * 1024**3


def default_cache_dir() -> Path:
    """Where remote shards are cached unless told otherwise."""
    from platformdirs import user_cache_path

    return user_cache_path("vlmdata") / "shards"


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
    """
    name = fspath(location).rstrip("/")
    remote = "://" in name
    cache = (cache_dir or default_cache_dir()) if remote else Path()
    dataset = VlmDataset(_fetch_tables(name, cache) if remote else name)
    files = tuple(ShardFile(shard.name, shard.bytes, shard.sha256) for shard in dataset.manifest.shards)
    source = RemoteShards(name, cache, cache_bytes) if remote else LocalShards(Path(name))
    return dataset, DatasetShards(name, files, source)


def _fetch_tables(url: str, cache: Path) -> Path:
    """Brings manifest and index here; they are small, and always fetched anew so that a changed dataset is seen."""
    import fsspec

    from vlmdata.format.atomic import write_atomically
    from vlmdata.format.manifest import canonical_hash

    directory = cache / "datasets" / canonical_hash(url)[:32]
    directory.mkdir(parents=True, exist_ok=True)
    for name in (INDEX_NAME, MANIFEST_NAME):
        try:
            with fsspec.open(f"{url}/{name}", "rb") as file:
                write_atomically(directory / name, file.read())
        except FileNotFoundError:
            raise DatasetFormatError(f"{url}: holds no {name}, so it is not a finished vlmdata dataset") from None
        except Exception as error:  # each fsspec back end has its own
            raise DatasetFormatError(f"{url}/{name}: cannot be fetched: {type(error).__name__}: {error}") from error
    return directory


def require_one_tokenizer(datasets: Sequence[VlmDataset]) -> None:
    """Refuses to mix datasets whose token ids mean different things.

    Raises:
        ConfigMismatchError: Naming both.
    """
    first = datasets[0]
    for other in datasets[1:]:
        a, b = first.manifest.tokenizer, other.manifest.tokenizer
        if (a.fingerprint, a.pad, a.image) != (b.fingerprint, b.pad, b.image):
            raise ConfigMismatchError(
                f"datasets with different tokenizers cannot be mixed: {first.directory} has {a.name} "
                f"({a.fingerprint[:16]}), {other.directory} has {b.name} ({b.fingerprint[:16]}). "
                "Preprocess one of them again with the other's tokenizer."
            )


def sample_table(datasets: Sequence[VlmDataset]) -> SampleTable:
    """The planner's columns of all datasets, one after another.

    Raises:
        DatasetFormatError: If a dataset has no samples.
    """
    for dataset in datasets:
        if len(dataset) == 0:
            raise DatasetFormatError(f"{dataset.directory}: has no samples (all rows were rejected?)")
    tables = []
    for dataset in datasets:
        index = dataset.index
        tables.append(table_from_columns(index.lengths, index.grids, index.grid_offsets, np.asarray(index.shard)))
    return concatenate_tables(tables)
