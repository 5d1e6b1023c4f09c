"""Memory is kept from one image to the next, up to a bound, unless the user's environment says otherwise."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from PIL import Image

from tests.conftest import encoded_image
from vlmdata.media.c_library import KEPT_BYTES, keep_memory
from vlmdata.media.decode import decode_image


@pytest.fixture
def pillow_block() -> Iterator[None]:
    before = Image.core.get_block_size()  # type: ignore[attr-defined]
    yield
    Image.core.set_block_size(before)  # type: ignore[attr-defined]


def in_a_fork(measure: Callable[[], int]) -> int:
    """What a function returns in a process of its own, as the settings of an allocator cannot be taken back."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(write, str(measure()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        found = int(file.read())
    os.waitpid(child, 0)
    return found


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def kept_of(size: int) -> int:
    """Bytes that the process keeps of an array of this size."""
    keep_memory()
    before = resident()
    np.ones(size, np.uint8)
    return resident() - before


@pytest.fixture
def no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_choice")
def test_the_memory_of_an_image_serves_the_next() -> None:
    size = KEPT_BYTES // 4
    assert in_a_fork(lambda: kept_of(size)) > size // 2


@pytest.mark.usefixtures("no_choice")
def test_the_memory_of_a_larger_image_is_given_back() -> None:
    assert in_a_fork(lambda: kept_of(2 * KEPT_BYTES)) < KEPT_BYTES // 2


@pytest.mark.usefixtures("pillow_block")
def test_pillow_decodes_a_large_image_into_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")  # the allocator of this process stays as it is
    data = encoded_image(5000, 1000, compress_level=0)
    copied = decode_image(data, 10_000_000)
    keep_memory()
    uncopied = decode_image(data, 10_000_000)
    assert uncopied.memory.shape == (1000, 5000, 4)
    assert np.array_equal(uncopied.pixels, copied.pixels)


@pytest.mark.usefixtures("pillow_block")
def test_choices_in_the_environment_have_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    monkeypatch.setenv("PILLOW_BLOCK_SIZE", "1m")
    Image.core.set_block_size(1 << 20)  # type: ignore[attr-defined]
    keep_memory()
    assert Image.core.get_block_size() == 1 << 20  # type: ignore[attr-defined]
    size = KEPT_BYTES // 4
    assert in_a_fork(lambda: kept_of(size)) < size // 2
