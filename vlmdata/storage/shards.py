"""Reads shards, local, cached or by ranges, by offset and with checks."""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from collections.abc import Buffer, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from vlmdata.errors import DatasetFormatError, ResourceError, UnreadableDataError
from vlmdata.format.dataset import changed_data
from vlmdata.format.manifest import Manifest, ShardInfo
from vlmdata.media.versions import require_pixels
from vlmdata.storage.choices import Verify
from vlmdata.storage.download import Extents, FetchedRanges, RemoteRanges
from vlmdata.wording import LaterText, Text, counted

#: Files kept open per process; far below the usual limit of 1,024.
_OPEN_FILES = 128


class ShardSource(Protocol):
    """A source of a dataset's shards."""

    def local_path(self, shard: ShardInfo) -> Path:
        """Returns the local path of an opened shard."""

    def open(self, shard: ShardInfo) -> int:
        """Opens the shard and returns a file descriptor, which the caller closes.

        Raises:
            VlmdataError: If the shard is not available.
        """

    def open_sound(self, shard: ShardInfo) -> int | None:
        """Opens a sound copy of a shard of which damaged bytes were read; None if there is no other copy.

        Raises:
            VlmdataError: If no sound copy can be fetched.
        """


@dataclass(frozen=True)
class LocalShards:
    """Shards in a folder."""

    directory: Path

    def local_path(self, shard: ShardInfo) -> Path:
        """Returns the path of the file."""
        return self.directory / shard.name

    def open(self, shard: ShardInfo) -> int:
        """Opens the file.

        Raises:
            DatasetFormatError: If the file is missing or not readable.
            ResourceError: If too many files are open.
        """
        path = self.local_path(shard)
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise ResourceError(f"{path}: {error.strerror}; raise the limit (`ulimit -n`)") from error
            raise DatasetFormatError(
                f"{path}: cannot open the shard: {error.strerror}. Run `vlmdata verify` on the dataset; it names the "
                "remedy."
            ) from error

    def open_sound(self, shard: ShardInfo) -> None:
        """Returns None: the file in the folder is the only one."""


@dataclass(frozen=True)
class DatasetShards:
    """A dataset's shards and their source. Small and picklable, so that a worker needs no index."""

    name: str  # location of the dataset, as given by the user
    files: tuple[ShardInfo, ...]  # shards by number
    source: ShardSource | RemoteRanges
    libraries: Mapping[str, str]  # versions of the libraries that made its pixels, by name, for messages

    @classmethod
    def of(cls, name: str, manifest: Manifest, source: ShardSource) -> DatasetShards:
        """Returns the shards of a dataset with this manifest."""
        return cls(name, manifest.shards, source, manifest.pixel_libraries)


class ShardStore:
    """Reads byte ranges of shards, keeping files open. One per process.

    Reads use ``preadv`` directly into the batch's buffer: as fast as copying from a memory map, without page faults,
    and a truncated file is an error instead of a SIGBUS. Of shards read by ranges, the caller names the bytes to come
    (:meth:`fetched`). If bytes of a cached shard are damaged, the copy in the cache is compared with the manifest,
    fetched again if it differs, and read once more; damaged ranges are fetched again: only then are the bytes an error.
    Datasets and shards are given by number, and ``what`` names row, key and field in messages.
    """

    def __init__(self, datasets: Sequence[DatasetShards], verify: Verify):
        self._datasets = datasets
        self._verify = verify
        self._open: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._renewed: set[tuple[int, int]] = set()
        remote = {n: each.source.url for n, each in enumerate(datasets) if isinstance(each.source, RemoteRanges)}
        self._ranges = FetchedRanges(remote, [[file.name for file in each.files] for each in datasets])
        self.fetches_ranges = bool(remote)
        self.bytes_read = 0

    @contextmanager
    def fetched(self, extents: Extents) -> Iterator[None]:
        """Fetches bytes of shards that are read by ranges. Within the block, :meth:`read` finds them.

        Raises:
            DatasetFormatError: If some cannot be fetched.
        """
        self._ranges.fetch(extents)
        try:
            yield
        finally:
            self._ranges.forget()

    def read(self, dataset: int, shard: int, offset: int, into: memoryview, checksum: int | None, what: Text) -> None:
        """Fills ``into`` from a shard, from byte ``offset`` on, and checks the xxh3-64 if one is given.

        Without one the caller checks the bytes (:meth:`require_sound`).

        Raises:
            DatasetFormatError: If the file is missing or short, or the bytes have changed.
            UnreadableDataError: If reading from disk fails.
        """
        if isinstance(self._datasets[dataset].source, RemoteRanges):
            self._ranges.copy(dataset, shard, offset, into)
        else:
            self._read_file(dataset, shard, offset, into, what)
        self.bytes_read += into.nbytes
        if checksum is not None:
            self.require_sound(dataset, shard, offset, into, checksum, what)

    def require_sound(self, dataset: int, shard: int, offset: int, data: memoryview, checksum: int, what: Text) -> None:
        """Checks stored bytes, if these are verified. Damaged bytes are fetched again from where the shards are.

        Raises:
            ChangedDataError: If the bytes have changed.
            VlmdataError: If a damaged copy in the cache cannot be fetched again.
        """
        if self.is_sound(data, checksum):
            return
        if isinstance(self._datasets[dataset].source, RemoteRanges):
            if self._ranges.fetch_again(dataset, shard, offset, data, partial(self.is_sound, checksum=checksum)):
                return
        elif self._renew(dataset, shard):
            self._read_file(dataset, shard, offset, data, what)
            if self.is_sound(data, checksum):
                return
        raise changed_data(f"{self.path(dataset, shard)}: {what}", data, checksum)

    def _read_file(self, dataset: int, shard: int, offset: int, into: memoryview, what: Text) -> None:
        try:
            self._read_once(dataset, shard, offset, into, what)
        except UnreadableDataError:
            if not self._renew(dataset, shard):
                raise
            self._read_once(dataset, shard, offset, into, what)

    def _renew(self, dataset: int, shard: int) -> bool:
        """Opens a sound copy of a shard, once per shard. Returns False if there is none."""
        key, source = (dataset, shard), self._datasets[dataset].source
        if key in self._renewed or isinstance(source, RemoteRanges):
            return False
        self._renewed.add(key)
        file = source.open_sound(self._datasets[dataset].files[shard])
        if file is None:
            return False
        if (old := self._open.pop(key, None)) is not None:
            os.close(old)
        self._open[key] = file
        return True

    def _read_once(self, dataset: int, shard: int, offset: int, into: memoryview, what: Text) -> None:
        file = self._file(dataset, shard)
        done = 0
        while done < into.nbytes:
            try:
                got = os.preadv(file, [into[done:]], offset + done)
            except OSError as error:
                raise UnreadableDataError(
                    f"{self.path(dataset, shard)}: {what}: cannot be read at byte {offset + done}: "
                    f"{error.strerror or error}. Check the disk; `vlmdata verify` shows what else is damaged."
                ) from error
            if got == 0:
                raise DatasetFormatError(
                    f"{self.path(dataset, shard)}: {what}: the file ends at byte {offset + done}, "
                    f"{counted(into.nbytes - done, 'byte')} early. "
                    "Run `vlmdata verify` on the dataset to see how to repair it."
                )
            done += got

    def is_sound(self, data: Buffer, checksum: int) -> bool:
        """Returns whether stored bytes have their checksum, or none are verified. For :meth:`require_sound`."""
        return self._verify == "off" or xxhash.xxh3_64_intdigest(data) == checksum

    def require_pixels(
        self, dataset: int, shard: int, patches: npt.NDArray[np.uint8], checksum: int, what: Text
    ) -> None:
        """Checks decoded patches, if these are verified.

        Raises:
            DatasetFormatError: If the patches differ from those of the dataset.
        """
        if self._verify == "pixels":
            libraries = self._datasets[dataset].libraries
            require_pixels(patches, checksum, libraries, LaterText(self.place, dataset, shard, what))

    def _file(self, dataset: int, shard: int) -> int:
        key = (dataset, shard)
        if key in self._open:
            self._open.move_to_end(key)
            return self._open[key]
        info, source = self._datasets[dataset].files[shard], self._datasets[dataset].source
        assert not isinstance(source, RemoteRanges)
        file = source.open(info)
        size = os.fstat(file).st_size
        if size != info.bytes:
            os.close(file)
            raise DatasetFormatError(
                f"{self.path(dataset, shard)}: {size} bytes, but the manifest says {info.bytes} (sha256 "
                f"{info.sha256}); the shard was truncated or replaced. Run `vlmdata verify` on the dataset "
                "to see how to repair it."
            )
        self._open[key] = file
        if len(self._open) > _OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        return file

    def path(self, dataset: int, shard: int) -> str:
        """Returns the shard's name for messages: with the user's location, and its local copy if any."""
        found = self._datasets[dataset]
        name = f"{found.name}/{found.files[shard].name}"
        if isinstance(found.source, RemoteRanges):
            return name
        path = found.source.local_path(found.files[shard])
        return name if name == str(path) else f"{name} (read from {path})"

    def place(self, dataset: int, shard: int, what: Text) -> str:
        """Returns a place in a shard for messages: the shard's name, and what of it."""
        return f"{self.path(dataset, shard)}: {what}"

    def close(self) -> None:
        """Closes all files."""
        while self._open:
            os.close(self._open.popitem()[1])
