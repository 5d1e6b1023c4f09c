"""Memory stays flat: the parent's does not grow with the dataset, a worker's is that of a few images."""

from __future__ import annotations

import io
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.conftest import cord_row, write_cord_parquet
from tests.preprocess.command_line import TOKENIZER, start, workers_of
from vlmdata.format.manifest import Manifest

pytestmark = pytest.mark.slow

MIB = 1 << 20
FEW, MANY = 100, 460
SIDE = 256  # of the moderate images, whose pixels do not compress


@dataclass(frozen=True)
class Peaks:
    """Greatest memory seen, in bytes.

    Attributes:
        parent: Resident memory of the parent, as the kernel kept it; mapped files count.
        worker: Anonymous memory of the greatest worker: what it allocated. (Pages of the mapped source come and go
            as the kernel likes.)
        shards: Size of the shards made.
    """

    parent: int
    worker: int
    shards: int


def measure(source: Path, out: Path, rows_per_shard: int, *options: Any) -> Peaks:
    """Runs the command with two workers and watches it."""
    arguments = ["--out", out, *TOKENIZER, "-j", 2, "--rows-per-shard", rows_per_shard, *options]
    process = start("preprocess", source, *arguments)
    parent, workers, looked = 0, dict[int, int](), 0.0
    while process.poll() is None:
        parent = max(parent, _kib(process.pid, "VmHWM"))
        if len(workers) < 2 and time.monotonic() - looked > 0.2:  # looking for them reads all processes
            looked = time.monotonic()
            workers = {worker.pid: 0 for worker in workers_of(process)}
        workers = {worker: max(most, _kib(worker, "RssAnon")) for worker, most in workers.items()}
        time.sleep(0.01)
    _, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert len(workers) == 2
    return Peaks(parent * 1024, max(workers.values()) * 1024, Manifest.read(out).totals.bytes)


def _kib(process: int, field: str) -> int:
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    found = re.search(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) if found else 0


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Peaks:
    return moderate(tmp_path_factory.mktemp("few"), FEW)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Peaks:
    return moderate(tmp_path_factory.mktemp("many"), MANY)


def moderate(folder: Path, rows: int) -> Peaks:
    """Memory over a source of so many moderate images."""
    template = [cord_row(n, width=SIDE, height=SIDE) for n in range(8)]
    # A Parquet page is read whole, and `datasets` writes a row group of images as one page.
    source = write_cord_parquet(
        folder / "source" / "train.parquet", [template[n % 8] for n in range(rows)], rows_per_group=50
    )
    return measure(source, folder / "out", 50, "--min-pixels", 1024)


@pytest.fixture
def large(tmp_path: Path) -> Peaks:
    """Memory over 9 images of 12 million pixels, 36 MB each when decoded: 8 for one worker, 1 for the other."""
    pixels = np.zeros((3000, 4000, 3), np.uint8)
    pixels[::7] = 200
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG", compress_level=1)
    row = {**cord_row(0), "image": {"bytes": buffer.getvalue(), "path": None}}
    source = write_cord_parquet(tmp_path / "source" / "train.parquet", [row] * 9)
    return measure(source, tmp_path / "out", 8)


def test_memory_of_the_parent_does_not_grow_with_the_dataset(few: Peaks, many: Peaks) -> None:
    more_data = many.shards - few.shards
    assert more_data > 64 * MIB  # more than four times the rows
    assert many.parent - few.parent < 24 * MIB, (few, many)


def test_memory_of_a_worker_does_not_grow_with_the_dataset(few: Peaks, many: Peaks) -> None:
    assert many.worker - few.worker < 24 * MIB, (few, many)


def test_memory_of_a_worker_is_bounded_by_a_few_images(few: Peaks, large: Peaks) -> None:
    decoded = 3000 * 4000 * 3
    assert large.worker - few.worker < 5 * decoded, (few, large)
    assert large.worker - few.worker > decoded / 2, "the measurement sees no image at all"
