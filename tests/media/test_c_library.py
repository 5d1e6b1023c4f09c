"""Memory is kept from one image to the next, up to a bound, unless the user's environment says otherwise."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

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


def kept_of(size: int) -> int:
    """Bytes that a new process keeps of an array of this size, after :func:`keep_memory`.

    A new one: this process may have been told to keep memory, and would serve the array with what it has kept.
    """
    program = f"""
import resource

import numpy as np

from vlmdata.media.c_library import keep_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

keep_memory()
before = resident()
np.ones({size}, np.uint8)
print(resident() - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.fixture
def no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_choice")
def test_the_memory_of_an_image_serves_the_next() -> None:
    size = KEPT_BYTES // 4
    assert kept_of(size) > size // 2


@pytest.mark.usefixtures("no_choice")
def test_the_memory_of_a_larger_image_is_given_back() -> None:
    assert kept_of(2 * KEPT_BYTES) < KEPT_BYTES // 2


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
    assert kept_of(size) < size // 2
