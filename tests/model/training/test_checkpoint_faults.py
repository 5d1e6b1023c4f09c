"""No room, no permission, half-written leftovers: a clear word, exit code 3, and earlier checkpoints as they were."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from tests.conftest import tree_bytes
from vlmdata.errors import ResourceError

KIB = 1024


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a file system in memory of so many KiB at ``run/checkpoints``; again, it resizes the one it made."""
    point = tmp_path / "run" / "checkpoints"
    mounted = []

    def mount(kib: int) -> Path:
        point.mkdir(parents=True, exist_ok=True)
        options = f"size={kib}k" + (",remount" if mounted else "")
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", point], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"a small disk cannot be mounted here (it needs root): {done.stderr.strip()}")
        mounted.append(kib)
        return point

    if os.geteuid() != 0 or sys.platform != "linux":
        pytest.skip("a small disk can be mounted by root on Linux only")
    try:
        yield mount
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", point], check=True)


def kib_of(folder: Path) -> int:
    """KiB that a folder's files take, as a file system counts."""
    return sum(file.stat().st_blocks for file in folder.rglob("*")) // 2


@pytest.mark.parametrize("in_background", [False, True])
def test_a_disk_that_fills_up_ends_the_run_and_keeps_the_checkpoints(
    run: Any, small_disk: Callable[[int], Path], in_background: bool
) -> None:
    folder = small_disk(400 * KIB)
    settings = {"run__save_every": 1, "run__async_save": in_background}
    run(run__steps=1, **settings)
    before, size = tree_bytes(folder), kib_of(folder)

    # Tensors alone would fit a second time, but not all that is written around them: it ends in the midst of a file.
    tensors = sum(_tensor_bytes(folder / "step-00000001")) // KIB
    small_disk(size + tensors + 100)
    what = rf"{folder}: a checkpoint of {tensors * KIB / 1e6:.1f} MB could not be saved"
    with pytest.raises(ResourceError, match=rf"{what}: {os.strerror(errno.ENOSPC)}; [0-9.]+ MB free") as caught:
        run(resume=True, run__steps=2, **settings)
    message = str(caught.value)
    assert "step-00000001 is the newest whole one" in message
    assert "Make room" in message
    assert tree_bytes(folder) == before

    if not in_background:  # less than that is seen before a byte is written
        small_disk(size + tensors - 100)
        room = f"{(tensors - 100) * KIB / 1e6:.1f} MB free"
        with pytest.raises(ResourceError, match=f"{what}: there is no room for it; {room}"):
            run(resume=True, run__steps=2, **settings)
        assert tree_bytes(folder) == before
        return

    small_disk(400 * KIB)
    # As a run leaves it that is killed while it saves.
    (folder / ".step-00000007.tmp").mkdir()
    (folder / ".step-00000007.tmp" / "__0_0.distcp").write_bytes(b"half")
    assert run(resume=True, run__steps=2, **settings).steps == 2
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000001", "step-00000002"]


def _tensor_bytes(checkpoint: Path) -> Iterator[int]:
    from megatron.core import dist_checkpointing

    for tensor in dist_checkpointing.load_plain_tensors(str(checkpoint)).values():
        yield tensor.nbytes if isinstance(tensor, torch.Tensor) else 0


def test_a_folder_that_cannot_be_written_is_told_before_the_first_step(run: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match=r"run\.out .*file/run cannot be written: Not a directory.*choose another"):
        run("file/run")


def test_a_folder_that_can_no_longer_be_written_ends_the_run(run: Any, tmp_path: Path) -> None:
    """A file where checkpoints go: permissions, which do not bind root, end in the same place."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("")
    with pytest.raises(
        ResourceError, match=r"checkpoints: a checkpoint of .* could not be saved: Not a directory.*there is none yet"
    ):
        run(run__steps=1)
