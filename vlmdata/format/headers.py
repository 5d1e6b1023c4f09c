"""Headers of tar members and of npy arrays. They contain no time, user or host."""

from __future__ import annotations

import io
import tarfile
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

_MODE = 0o644
_NAME = slice(0, tarfile.LENGTH_NAME)
_SIZE = slice(124, 135)
_CHECKSUM = slice(148, 154)
_LARGEST = 8 ** len(range(*_SIZE.indices(tarfile.BLOCKSIZE))) - 1


def tar_header(name: str, size: int) -> bytes:
    """Builds the ustar header of a regular file.

    Equals the header of :class:`tarfile.TarInfo`, which takes ten times as long.

    Args:
        name: Name of the member.
        size: Its bytes.
    """
    encoded = name.encode()
    if len(encoded) > tarfile.LENGTH_NAME or size > _LARGEST:
        return _slow_header(name, size)
    blank, total = _blank()
    digits = b"%011o" % size
    header = bytearray(blank)
    header[: len(encoded)] = encoded
    header[_SIZE] = digits
    # The checksum is the sum of all bytes, its own counted as spaces.
    header[_CHECKSUM] = b"%06o" % (total + sum(encoded) + sum(digits))
    return bytes(header)


def _slow_header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, _MODE
    return info.tobuf(tarfile.USTAR_FORMAT)


@lru_cache(maxsize=1)
def _blank() -> tuple[bytes, int]:
    """Returns a header without a name, and the sum of its bytes but for the size's digits."""
    header = _slow_header("", 0)
    return header, int(header[_CHECKSUM], 8) - sum(header[_SIZE])


def npy_header(array: npt.NDArray[np.generic]) -> bytes:
    """Builds the ``.npy`` version 1.0 header of a C-contiguous array, padded to a multiple of 64 bytes."""
    return npy_header_for(array.dtype, array.shape)


@lru_cache(maxsize=1024)
def npy_header_for(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Builds the ``.npy`` header of a dtype and shape, without an array."""
    buffer = io.BytesIO()
    description = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(buffer, {"descr": description, "fortran_order": False, "shape": shape})
    return buffer.getvalue()
