"""Packs without data, and clients' requests for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from vlmdata.loader.fill.buffers import BufferPool
from vlmdata.loader.fill.filler import Filled
from vlmdata.service.server.packs import FilledPack

MIB = 1 << 20


def pack_request(number: int, size: int = 4 * MIB) -> Any:
    """A request for a pack of tokens that fills its buffer."""
    request = SimpleNamespace(
        arrays=SimpleNamespace(bytes=size, placed=(), has_patches=False),
        position=SimpleNamespace(epoch=0),
        pack=SimpleNamespace(number=number),
        pixels="uint8",
    )
    request.whole = lambda _: request
    return request


def filled_pack(size: int) -> FilledPack:
    """A pack whose buffer is shared memory."""
    lease = BufferPool().acquire(size)
    generation = lease.renew()
    buffer = lease.array()
    buffer[:size] = np.arange(size) % 251
    return FilledPack(pack_request(0, size), buffer, lease.name, generation, Filled(size))


def whole(pack: FilledPack) -> Any:
    """A client's request for all of a pack."""
    return SimpleNamespace(arrays=pack.request.arrays, context_parallel=None)
