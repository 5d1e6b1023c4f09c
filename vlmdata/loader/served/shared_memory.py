"""Batches from a server on the same machine: the client copies them out of the server's memory.

A connection, even over loopback, copies each batch several times. So a client says in its query where it runs. A server
that runs there too answers with the place of the batch in its shared memory (``BufferPool``) instead of with the bytes.

- The kernel guards that memory: only processes of the same user and the same process namespace can open it. These could
  also read the server's whole memory (``ptrace``), so sharing adds no rights. Others get the bytes through the
  connection, with the same query.
- The memory has no name in a file system. A killed server or client leaves nothing behind.
- The client opens it for reading and copies. So neither side can write into a batch that the other one uses.
- The server keeps the pack until the client ends its query. If the client stalls and others need the memory, it holds
  another pack soon; the checksum at the end of the answer tells, and the client asks for the bytes.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from vlmdata.loader.buffers import BufferName

#: Offset of a piece that is not in the shared memory, but in the answer.
IN_ANSWER = -1

_OF_A_PROCESS = re.compile(r"/proc/(\d+)/fd/(\d+)")


class SharedMemoryError(Exception):
    """The server's memory cannot be read, or no longer holds the batch. The bytes can still be fetched."""


@cache
def this_place() -> str:
    """Returns where this process runs, as a hash; "" if memory cannot be shared here.

    Processes that have it in common can open each other's memory: those of one user, process namespace and user
    namespace on one machine since its last start.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        namespaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "user")]
    except OSError:  # not Linux
        return ""
    return hashlib.sha256("\n".join([boot, *namespaces, str(os.geteuid())]).encode()).hexdigest()


@dataclass(frozen=True)
class SharedPack:
    """The place of a batch in a server's memory.

    Attributes:
        process: The server's process id.
        file: Its file descriptor of the memory.
        inode: Inode of the memory. The descriptor may mean another file later.
        pieces: Offset and bytes of each piece of the batch, in order. A piece at :data:`IN_ANSWER` is in the answer.
    """

    process: int
    file: int
    inode: int
    pieces: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, name: BufferName, pieces: tuple[tuple[int, int], ...]) -> Self | None:
        """Returns the place of some pieces of a buffer; None if the buffer is not shared through ``/proc``."""
        found = _OF_A_PROCESS.fullmatch(name.path)
        return None if found is None else cls(int(found[1]), int(found[2]), name.inode, pieces)

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON values."""
        return {"process": self.process, "file": self.file, "inode": self.inode, "pieces": self.pieces}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Reads JSON values.

        Raises:
            ValueError: If a number is missing or wrong. So are KeyError and TypeError.
        """
        pieces = tuple((int(offset), int(size)) for offset, size in values["pieces"])
        return cls(int(values["process"]), int(values["file"]), int(values["inode"]), pieces)

    def copy(self, in_answer: npt.NDArray[np.uint8], buffer: npt.NDArray[np.uint8]) -> None:
        """Copies the batch.

        Args:
            in_answer: uint8, the pieces that are in the answer, one after another.
            buffer: uint8, where the batch goes; exactly as long.

        Raises:
            SharedMemoryError: If the memory cannot be opened, or does not hold the batch.
        """
        file = self._open()
        try:
            at = taken = 0
            for offset, size in self.pieces:
                target = buffer[at : at + size]
                if size < 0 or len(target) < size:
                    raise SharedMemoryError("its pieces are longer than the batch")
                if offset == IN_ANSWER:
                    if taken + size > len(in_answer):
                        raise SharedMemoryError("the answer lacks a piece")
                    target[:] = in_answer[taken : taken + size]
                    taken += size
                else:
                    _read(file, offset, target)
                at += size
            if at < len(buffer):
                raise SharedMemoryError("its pieces are shorter than the batch")
        finally:
            os.close(file)

    def _open(self) -> int:
        path = f"/proc/{self.process}/fd/{self.file}"
        try:
            # Without waiting: a server that is no server of ours could name a pipe.
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except (OSError, ValueError) as error:
            raise SharedMemoryError(f"{path} cannot be opened: {error}") from error
        found = os.fstat(file)
        if found.st_ino != self.inode or not stat.S_ISREG(found.st_mode):
            os.close(file)
            raise SharedMemoryError(f"{path} is not the server's memory")
        return file


def _read(file: int, offset: int, target: npt.NDArray[np.uint8]) -> None:
    """Reads as many bytes as the target has. Not mapped: the server may cut the file, and the kernel kill a reader."""
    rest = memoryview(target)
    try:
        while rest:
            if not (count := os.preadv(file, [rest], offset)):
                raise SharedMemoryError("the server has given the memory up")
            rest, offset = rest[count:], offset + count
    except (OSError, OverflowError) as error:
        raise SharedMemoryError(f"the server's memory cannot be read: {error}") from error
