"""Headers of members and arrays against those of tarfile and numpy."""

from __future__ import annotations

import io
import tarfile

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vlmdata.format.shard import npy_header_for, tar_header

names = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=100)


def header_of_tarfile(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.USTAR_FORMAT, encoding="utf-8")


@given(names.filter(lambda name: len(name.encode()) <= 100), st.integers(0, 8**11 - 1))
@example("000000012.input_ids.npy", 8**11 - 1)
@example("a" * 100, 0)
@example("folder/" * 30 + "file", 3)
def test_tar_headers_are_those_of_tarfile(name: str, size: int) -> None:
    assert tar_header(name, size) == header_of_tarfile(name, size)


@pytest.mark.parametrize(("name", "size"), [("a" * 101, 1), ("a", 8**11)])
def test_what_ustar_cannot_hold_is_an_error(name: str, size: int) -> None:
    with pytest.raises(ValueError):
        tar_header(name, size)


@pytest.mark.parametrize("shape", [(0, 3), (5,), (3, 7), (1234567, 768)])
def test_npy_header_is_what_numpy_saves(shape: tuple[int, ...]) -> None:
    array = np.broadcast_to(np.zeros((), np.int32), shape)
    if array.size < 1000:
        buffer = io.BytesIO()
        np.save(buffer, np.ascontiguousarray(array))
        assert buffer.getvalue().startswith(npy_header_for(array.dtype, array.shape))
    assert len(npy_header_for(array.dtype, array.shape)) % 64 == 0
