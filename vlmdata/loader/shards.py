"""Open shard files, local or cached from a remote, read by offset and checked."""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from collections.abc import Buffer, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import xxhash

from vlmdata.errors import DatasetFormatError, ResourceError
from vlmdata.wording import counted

#: Files kept open per process; far below the usual limit of 1,024.
_OPEN_FILES = 128


@dataclass(frozen=True)
class ShardFile:
    """A shard as the manifest describes it."""

    name: str
    bytes: int
    sha256: str


class ShardSource(Protocol):
    """Where a dataset's shards come from."""

    def local_path(self, shard: ShardFile) -> Path:
        """Where the shard's bytes lie on this machine, once it was opened."""

    def open(self, shard: ShardFile) -> int:
        """A file descriptor to read the shard from; the caller closes it.

        Raises:
            VlmdataError: If it cannot be had.
        """


@dataclass(frozen=True)
class LocalShards:
    """Shards in a folder."""

    directory: Path

    def local_path(self, shard: ShardFile) -> Path:
        """The file itself."""
        return self.directory / shard.name

    def open(self, shard: ShardFile) -> int:
        """Opens the file.

        Raises:
            DatasetFormatError: If it is missing or may not be read.
            ResourceError: If too many files are open.
        """
        path = self.local_path(shard)
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise ResourceError(f"{path}: {error.strerror}; raise the limit (`ulimit -n`)") from error
            raise DatasetFormatError(
                f"{path}: cannot open the shard: {error.strerror}. Run `vlmdata verify` on the dataset; it says how to "
                "mend it."
            ) from error


@dataclass(frozen=True)
class DatasetShards:
    """A dataset's shards and where they come from. Small and picklable: a worker needs no index.

    Attributes:
        name: The dataset as the user named it.
        files: Shards by number.
        source: Where they come from.
    """

    name: str
    files: tuple[ShardFile, ...]
    source: ShardSource


class ShardStore:
    """Reads byte ranges of shards, keeping files open. One per process.

    Reads go through ``preadv`` straight into the batch's buffer: as fast as copying from a map, with no page
    faults, and a file cut short is an error rather than a SIGBUS.

    Args:
        datasets: The datasets by number.
        verify: Whether every read is checked against its checksum.
    """

    def __init__(self, datasets: Sequence[DatasetShards], verify: bool):
        self._datasets = datasets
        self._verify = verify
        self._open: OrderedDict[tuple[int, int], int] = OrderedDict()
        self.bytes_read = 0

    def read(self, dataset: int, shard: int, offset: int, into: memoryview, checksum: int | None, what: str) -> None:
        """Fills ``into`` from a shard.

        Args:
            dataset: Dataset number.
            shard: Shard number.
            offset: First byte.
            into: Writable bytes; all of them are filled.
            checksum: xxh3-64 the bytes must have; None leaves the check to the caller (:meth:`is_sound`).
            what: Row, key and field, for messages.

        Raises:
            DatasetFormatError: If the file is missing, short, or the bytes are not those that were written.
            ResourceError: If the disk cannot read it.
        """
        file = self._file(dataset, shard)
        done = 0
        while done < into.nbytes:
            try:
                got = os.preadv(file, [into[done:]], offset + done)
            except OSError as error:
                path = self.path(dataset, shard)
                raise ResourceError(f"{path}: {what}: cannot be read at byte {offset + done}: {error}") from error
            if got == 0:
                raise DatasetFormatError(
                    f"{self.path(dataset, shard)}: {what}: the file ends at byte {offset + done}, "
                    f"{counted(into.nbytes - done, 'byte')} early. "
                    "Run `vlmdata verify` on the dataset; it says how to mend it."
                )
            done += got
        self.bytes_read += done
        if checksum is not None and not self.is_sound(into, checksum):
            raise self.changed(dataset, shard, into, checksum, what)

    def is_sound(self, data: Buffer, checksum: int) -> bool:
        """Whether bytes have their checksum; always, if reads are not verified."""
        return not self._verify or xxhash.xxh3_64_intdigest(data) == checksum

    def changed(self, dataset: int, shard: int, data: Buffer, checksum: int, what: str) -> DatasetFormatError:
        """The error for bytes that are not :meth:`is_sound`."""
        return DatasetFormatError(
            f"{self.path(dataset, shard)}: {what}: the data changed after preprocessing: xxh3 is "
            f"{xxhash.xxh3_64_intdigest(data):016x}, expected {checksum:016x}. Run `vlmdata verify` on the "
            "dataset; it says how to mend it."
        )

    def _file(self, dataset: int, shard: int) -> int:
        key = (dataset, shard)
        if key in self._open:
            self._open.move_to_end(key)
            return self._open[key]
        info = self._datasets[dataset].files[shard]
        file = self._datasets[dataset].source.open(info)
        size = os.fstat(file).st_size
        if size != info.bytes:
            os.close(file)
            raise DatasetFormatError(
                f"{self.path(dataset, shard)}: {size} bytes, but the manifest says {info.bytes} (sha256 "
                f"{info.sha256}); the shard was cut or replaced. Run `vlmdata verify` on the dataset; "
                "it says how to mend it."
            )
        self._open[key] = file
        if len(self._open) > _OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        return file

    def path(self, dataset: int, shard: int) -> str:
        """For messages: the shard by the name the user gave, and its copy here if it is one."""
        found = self._datasets[dataset]
        name, path = f"{found.name}/{found.files[shard].name}", found.source.local_path(found.files[shard])
        return name if name == str(path) else f"{name} (read from {path})"

    def close(self) -> None:
        """Closes all files."""
        while self._open:
            os.close(self._open.popitem()[1])
