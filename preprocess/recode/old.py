"""The dataset to recode: its small files, checked against the manifest, and access to its shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from vlmdata.errors import DatasetFormatError
from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import JOINED
from vlmdata.locations import is_url, place_of
from vlmdata.media.codecs import RAW
from vlmdata.storage.folder import Folder
from vlmdata.storage.open import open_remote, shards_of
from vlmdata.storage.shards import DatasetShards
from vlmdata.storage.small_files import small_file_problems


@dataclass(frozen=True, eq=False)
class OldDataset:
    """A finished dataset.

    Attributes:
        name: The user's name for it.
        manifest: Its manifest.
        directory: A local folder with all files except the shards.
        shards: Access to its shards.
    """

    name: str
    manifest: Manifest
    directory: Path
    shards: DatasetShards

    @classmethod
    def open(cls, location: str | PathLike[str]) -> OldDataset:
        """Opens a dataset in a folder or at a URL.

        Raises:
            DatasetFormatError: If it is not a dataset, or one of its small files is missing or damaged.
            ResourceError: If a URL cannot be cached.
        """
        name = place_of(location)
        directory = open_remote(name).directory if is_url(name) else Path(name)
        manifest = Manifest.read(directory)
        found = cls(name, manifest, directory, shards_of(name, manifest))
        problems = list(small_file_problems(Folder(directory), manifest))
        if problems:
            raise DatasetFormatError(
                f"{name}: {'; '.join(problems)}. Run `vlmdata verify` on it to see how to repair it."
            )
        return found

    @property
    def codecs(self) -> tuple[str, ...]:
        """Names of the codecs that it was made with: one, or several if datasets of different codecs were joined."""
        return tuple(dict.fromkeys(_codecs(self.manifest.config)))


def _codecs(config: Mapping[str, Any]) -> Iterator[str]:
    if JOINED in config:
        for each in config[JOINED]:
            yield from _codecs(each)
    else:
        options = config.get("options")
        yield str(options.get("pixels", RAW)) if isinstance(options, Mapping) else RAW
