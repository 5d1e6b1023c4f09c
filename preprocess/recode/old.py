"""The dataset to recode: its small files, checked against the manifest, and access to its shards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from vlmdata.errors import DatasetFormatError
from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import IMAGE_FILES, IMAGE_FILES_NAME, INDEX_NAME, LEDGER_NAME
from vlmdata.format.tokenizer_files import tokenizer_findings
from vlmdata.loader.open import open_remote, shards_of
from vlmdata.loader.shards import DatasetShards
from vlmdata.locations import is_url, place_of
from vlmdata.media.codecs import RAW
from vlmdata.store.folder import Folder


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
        problems = list(found._problems())
        if problems:
            raise DatasetFormatError(
                f"{name}: {'; '.join(problems)}. Run `vlmdata verify` on it to see how to repair it."
            )
        return found

    @property
    def pixels(self) -> str:
        """Name of its codec."""
        options = self.manifest.config.get("options")
        return str(options.get("pixels", RAW)) if isinstance(options, dict) else RAW

    def _problems(self) -> Iterator[str]:
        hashes = {INDEX_NAME: self.manifest.index_sha256, LEDGER_NAME: self.manifest.ledger_sha256}
        if IMAGE_FILES in self.manifest.source:
            hashes[IMAGE_FILES_NAME] = self.manifest.source[IMAGE_FILES]["sha256"]
        here = Folder(self.directory)
        for name, expected in hashes.items():
            if (digest := here.sha256(name)) != expected:
                yield (
                    f"{name} has sha256 {digest}, but the manifest says {expected}" if digest else f"{name} is missing"
                )
        yield from (f"{file}: {message}" for file, _, message in tokenizer_findings(self.directory, self.manifest))
