"""No room: a clear word, exit code 3, nothing half-made left, and the same command continues once there is room."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import cord_row, tree_bytes, write_cord_parquet
from tests.preprocess.command_line import SMALL_IMAGES, Ended
from vlmdata.errors import ResourceError
from vlmdata.preprocess.config import ImageConfig, PreprocessConfig
from vlmdata.preprocess.run.dataset import preprocess_dataset
from vlmdata.preprocess.sources.open import open_source
from vlmdata.verify.dataset import verify_dataset

pytestmark = pytest.mark.slow

ROWS, ROWS_PER_SHARD = 60, 10
CONFIG = PreprocessConfig(image=ImageConfig(1024, 65_536), rows_per_shard=ROWS_PER_SHARD)
NO_SPACE, TOO_LARGE = os.strerror(errno.ENOSPC), os.strerror(errno.EFBIG)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [cord_row(n, width=128, height=128) for n in range(ROWS)]
    rows[11]["ground_truth"] = "{"
    return write_cord_parquet(tmp_path_factory.mktemp("disk-full") / "train.parquet", rows)


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a run with all the room it wants (about 3.4 MB)."""
    out = tmp_path_factory.mktemp("whole") / "out"
    preprocess_dataset(open_source(str(source)), out, CONFIG)
    assert verify_dataset(out).faults == []
    return tree_bytes(out)


@pytest.fixture
def command(vlmdata: Callable[..., Ended], source: Path) -> Callable[[Path, int], Ended]:
    """Runs the command with so many workers."""

    def call(out: Path, workers: int) -> Ended:
        options = ("--rows-per-shard", ROWS_PER_SHARD, "-j", workers, "--max-reject-rate", 1, *SMALL_IMAGES)
        return vlmdata("preprocess", source, "--out", out, *options)

    return call


def temporary_files(out: Path) -> list[str]:
    return [str(path) for path in out.glob("**/*.tmp")]


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Within the block a file of this process cannot grow beyond ``size`` bytes: EFBIG takes the place of ENOSPC."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_up_under_two_workers_ends_the_command_clearly_and_resumably(
    source: Path, whole: dict[str, bytes], small_disk: Callable[..., Path], command: Callable[..., Ended]
) -> None:
    out = small_disk(2000) / "out"  # of six shards of about 560 KiB three fit
    done = command(out, workers=2)
    assert done.code == 3, done.stderr
    assert done.stdout == ""
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert f"failed: {NO_SPACE}" in errors[0]
    assert "shard " in errors[0]
    assert "(rows " in errors[0]
    assert "free space" in errors[0]
    assert "run the same command again" in errors[0]
    assert "Traceback" not in done.stderr
    assert temporary_files(out) == []
    assert not (out / "manifest.json").exists()
    # A shard is complete with its record: the third's may find no room.
    kept = len(list(out.glob(".progress/shard-*.json")))
    assert 1 <= kept <= len(list(out.glob("shard-*.tar"))) <= 3

    small_disk(20_000)
    result = preprocess_dataset(open_source(str(source)), out, CONFIG)
    assert (result.made, result.kept) == (6 - kept, kept)
    assert tree_bytes(out) == whole


def test_a_limit_on_file_sizes_ends_the_command_clearly_and_resumably(
    source: Path, whole: dict[str, bytes], tmp_path: Path, command: Callable[..., Ended]
) -> None:
    out = tmp_path / "out"
    with files_up_to(300_000):  # above all files but the shards
        done = command(out, workers=1)
    assert done.code == 3, done.stderr
    assert f"shard 0 (rows 0 to 9) failed: {TOO_LARGE}. Finished shards are kept; free space" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert temporary_files(out) == []
    preprocess_dataset(open_source(str(source)), out, CONFIG)
    assert tree_bytes(out) == whole


def test_a_disk_that_is_full_from_the_start_is_reported_clearly(source: Path, small_disk: Callable[..., Path]) -> None:
    disk = small_disk(100)
    with suppress(OSError):
        (disk / "filler").write_bytes(bytes(200_000))
    with pytest.raises(ResourceError, match=rf"out: .*{NO_SPACE}.*free space"):
        preprocess_dataset(open_source(str(source)), disk / "out", CONFIG)
    (disk / "filler").unlink()
    assert temporary_files(disk) == []


def test_a_disk_that_fills_up_while_the_dataset_is_closed_keeps_all_shards(
    source: Path, whole: dict[str, bytes], small_disk: Callable[..., Path]
) -> None:
    """All shards and their records fit; index, ledger, tokenizer and manifest one after the other do not."""
    shards = sum(-(-len(content) // 4096) * 4 for name, content in whole.items() if name.startswith("shard-"))
    messages = set()
    out = small_disk(20_000) / "out"
    spare = 16
    while True:
        # Room for the shards, eighteen records of a page or two each, and a little more in every round.
        small_disk(shards + spare)
        try:
            preprocess_dataset(open_source(str(source)), out, CONFIG)
        except ResourceError as error:
            messages.add(str(error))
            assert temporary_files(out) == []
            assert not (out / ".progress" / "tokenizer").exists()
            assert not (out / "manifest.json").exists()
            spare += 28
            continue
        break
    assert tree_bytes(out) == whole
    closing = [message for message in messages if "6 shards made, but completing the dataset failed" in message]
    assert closing, messages
    assert all("Free disk space and run the same command again" in message for message in closing)
    assert all(NO_SPACE in message for message in messages)


@pytest.mark.parametrize("name", ["index.parquet", "rejected.jsonl", "tokenizer.json", "tokenizer_config.json"])
def test_a_closing_file_that_cannot_be_written_keeps_all_shards(
    source: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Without root: the limit on file sizes is set once the shards are made, lower than the file in question."""
    out = tmp_path / "out"
    from vlmdata.preprocess.run import closing
    from vlmdata.storage import derive

    size = len(next(content for path, content in whole.items() if path.rpartition("/")[2] == name))
    step = {"index.parquet": "writing_index", "rejected.jsonl": "writing_ledger"}.get(name, "saved_tokenizer")
    module = closing if step == "saved_tokenizer" else derive
    original = getattr(module, step)

    @contextmanager
    def limited(*arguments: Any) -> Iterator[Path]:
        with files_up_to(size - 1), original(*arguments) as path:
            yield path

    with monkeypatch.context() as patch:
        patch.setattr(module, step, limited)
        with pytest.raises(ResourceError) as caught:
            preprocess_dataset(open_source(str(source)), out, CONFIG)
    assert "6 shards made, but completing the dataset failed" in str(caught.value)
    assert TOO_LARGE in str(caught.value)
    assert "run the same command again" in str(caught.value)
    assert temporary_files(out) == []
    assert not (out / "manifest.json").exists()
    result = preprocess_dataset(open_source(str(source)), out, CONFIG)
    assert (result.made, result.kept) == (0, 6)
    assert tree_bytes(out) == whole


@pytest.mark.parametrize("workers", [1, 2])
def test_a_record_that_cannot_be_written_leaves_its_shard_to_be_made_anew(
    source: Path, whole: dict[str, bytes], tmp_path: Path, workers: int
) -> None:
    """A folder stands where a record is to go: permission, read-only disks and the like end in the same place."""
    out = tmp_path / "out"
    obstacle = out / ".progress" / "shard-000002.jsonl"
    (obstacle / "in the way").mkdir(parents=True)
    with pytest.raises(ResourceError, match=r"shard 2 \(rows 20 to 29\) failed: "):
        preprocess_dataset(open_source(str(source)), out, CONFIG, workers=workers)
    assert temporary_files(out) == []
    (obstacle / "in the way").rmdir()
    obstacle.rmdir()
    preprocess_dataset(open_source(str(source)), out, CONFIG)
    assert tree_bytes(out) == whole
