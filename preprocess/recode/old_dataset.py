"""A finished dataset that another one is made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from vlmdata.errors import DatasetFormatError, UsageError
from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import IMAGE_FILES_NAME, JOINED, KIND_FEATURES
from vlmdata.locations import is_url
from vlmdata.media.codecs import RAW, VIDEO
from vlmdata.storage.folder import Folder
from vlmdata.storage.join_checks import small_file_problems
from vlmdata.storage.open import open_remote, shards_of
from vlmdata.storage.shards import DatasetShards
from vlmdata.storage.versions import place_of_version


@dataclass(frozen=True, eq=False)
class OldDataset:
    """A finished dataset."""

    name: str  # the name that the user gave it
    manifest: Manifest  # its manifest
    directory: Path  # a local folder with all files except the shards
    shards: DatasetShards  # access to its shards

    @classmethod
    def open(cls, location: str | PathLike[str]) -> OldDataset:
        """Opens a dataset in a folder or at a URL.

        Raises:
            DatasetFormatError: If it is not a dataset, or one of its small files is missing or damaged.
            ResourceError: If a URL cannot be cached.
        """
        name = place_of_version(location)
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
    def files_compared_ns(self) -> int:
        """When its image files were found as listed: later changes count. 0, so that all are read, if not known."""
        # The list of a dataset at a URL is a copy, whose time is that of the download.
        return 0 if is_url(self.name) else (self.directory / IMAGE_FILES_NAME).stat().st_mtime_ns

    @property
    def codecs(self) -> tuple[str, ...]:
        """Names of the codecs that it was made with, of images first; several also if datasets were joined."""
        return tuple(dict.fromkeys([*self.image_codecs, *self.video_codecs]))

    @property
    def image_codecs(self) -> tuple[str, ...]:
        """Names of the codecs of images."""
        return tuple(dict.fromkeys(str(each.get("pixels", RAW)) for each in _options(self.manifest.config)))

    @property
    def video_codecs(self) -> tuple[str, ...]:
        """Names of the codecs of videos; empty if it has none."""
        if KIND_FEATURES[VIDEO] not in self.manifest.features:
            return ()
        found = [each["video"]["pixels"] for each in _options(self.manifest.config) if each.get("video")]
        return tuple(dict.fromkeys(found))

    def has_codecs(self, images: str | None, videos: str | None) -> bool:
        """Whether all images and all videos are stored with these."""
        return self.image_codecs == (images,) and self.video_codecs in ((), (videos,))

    def only_codec(self) -> str:
        """Returns the codec of images.

        Raises:
            UsageError: If there are several.
        """
        if len(self.image_codecs) > 1:
            names = " and ".join(self.image_codecs)
            raise UsageError(f"{self.name}: stores its images with {names}; give the codec of the copy as --pixels")
        return self.image_codecs[0]


def _options(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the options that a dataset was made with, or those of all that were joined."""
    if JOINED in config:
        for each in config[JOINED]:
            yield from _options(each)
    else:
        options = config.get("options")
        yield options if isinstance(options, Mapping) else {}
