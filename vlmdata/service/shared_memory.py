"""Batches from a server on the same machine: the client copies them out of the server's memory.

A connection, even over loopback, copies each batch several times. So a client says in its query where it runs. A server
that runs there too answers with the place of the batch in its shared memory (``BufferPool``) instead of with the bytes.

- The kernel guards that memory: only processes of the same user and the same process namespace can open it. These could
  also read the server's whole memory (``ptrace``), so sharing adds no rights. Others get the bytes through the
  connection, with the same query.
- The memory has no name in a file system. A killed server leaves nothing behind once its clients have noticed.
- The client maps it for reading, once per buffer, and copies. So neither side can write into a batch that the other one
  uses. The kernel has sealed its size, so that no server can cut it under a reader.
- The server keeps the pack until the client ends its query. If the client stalls and others need the memory, it holds
  another pack soon. The generation after the buffer tells, and the client asks for the bytes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import stat
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from vlmdata.loader.fill.buffers import GENERATION_BYTES, BufferName
from vlmdata.loader.fill.mapping import mapped

#: Offset of a piece that is not in the shared memory, but in the answer.
IN_ANSWER = -1

Bytes = npt.NDArray[np.uint8]

#: Buffers of a server that a client maps.
_MOST_MAPS = 128

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
    """The place of a batch in a server's memory: its process and file descriptor, which may mean another inode later.

    After the ``bytes`` of the buffer follows its generation. ``pieces`` are offset and bytes of each of the batch's
    pieces, in order. A piece at :data:`IN_ANSWER` is in the answer.
    """

    process: int
    file: int
    inode: int
    bytes: int
    generation: int
    pieces: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, name: BufferName, generation: int, pieces: tuple[tuple[int, int], ...]) -> Self | None:
        """Returns the place of some pieces of a buffer; None if the buffer is not shared through ``/proc``."""
        found = _OF_A_PROCESS.fullmatch(name.path)
        return None if found is None else cls(int(found[1]), int(found[2]), name.inode, name.bytes, generation, pieces)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Reads JSON values; a ValueError, KeyError or TypeError if a number is missing or wrong."""
        pieces = tuple((int(offset), int(size)) for offset, size in values["pieces"])
        process, file, inode, size, generation = (
            int(values[each.name]) for each in fields(cls) if each.name != "pieces"
        )
        return cls(process, file, inode, size, generation, pieces)

    def copy(self, in_answer: Bytes, buffer: Bytes, maps: Maps) -> None:
        """Copies the batch into a buffer of its size; ``in_answer`` holds the pieces that are in the answer.

        Raises:
            SharedMemoryError: If the memory cannot be mapped, or does not hold the batch.
        """
        memory = maps.memory(self)
        self._require_current(memory, maps)
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
            elif not 0 <= offset <= self.bytes - size:
                raise SharedMemoryError("its pieces are outside of the memory")
            else:
                target[:] = memory[offset : offset + size]
            at += size
        if at < len(buffer):
            raise SharedMemoryError("its pieces are shorter than the batch")
        self._require_current(memory, maps)

    def _require_current(self, memory: Bytes, maps: Maps) -> None:
        if int.from_bytes(memory[self.bytes :].tobytes(), "little") != self.generation:
            maps.forget(self)
            raise SharedMemoryError("it holds another batch by now")


class Maps:
    """Memory of one server, each buffer mapped once. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._maps: OrderedDict[tuple[int, int, int], Bytes] = OrderedDict()

    def memory(self, pack: SharedPack) -> Bytes:
        """Returns the buffer of a batch, with its generation, read-only; a SharedMemoryError if it cannot be mapped."""
        key = (pack.process, pack.file, pack.inode)
        with self._lock:
            if (known := self._maps.get(key)) is not None and len(known) == pack.bytes + GENERATION_BYTES:
                self._maps.move_to_end(key)
                return known
        mapped = _mapped(pack)
        with self._lock:
            self._maps[key] = mapped
            if len(self._maps) > _MOST_MAPS:
                self._maps.popitem(last=False)
        return mapped

    def forget(self, pack: SharedPack) -> None:
        """Unmaps a buffer."""
        with self._lock:
            self._maps.pop((pack.process, pack.file, pack.inode), None)

    def clear(self) -> None:
        """Unmaps all. Otherwise the memory of a server that was killed stays."""
        with self._lock:
            self._maps.clear()


def _mapped(pack: SharedPack) -> Bytes:
    path = f"/proc/{pack.process}/fd/{pack.file}"
    try:
        # Without waiting: a server that is no server of ours could name a pipe.
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except (OSError, ValueError) as error:
        raise SharedMemoryError(f"{path} cannot be opened: {error}") from error
    try:
        found, size = os.fstat(file), pack.bytes + GENERATION_BYTES
        if found.st_ino != pack.inode or not stat.S_ISREG(found.st_mode) or not 0 < size <= found.st_size:
            raise SharedMemoryError(f"{path} is not the server's memory")
        if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise SharedMemoryError(f"{path} could be cut while it is read")
        memory = np.frombuffer(mapped(file, size, writable=False), np.uint8)
        memory.flags.writeable = False
        return memory
    except (OSError, ValueError, OverflowError) as error:
        raise SharedMemoryError(f"{path} cannot be mapped: {error}") from error
    finally:
        os.close(file)
