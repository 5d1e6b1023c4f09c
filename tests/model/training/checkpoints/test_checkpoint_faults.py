"""No room, no permission, half-written leftovers: a clear word, exit code 3, and earlier checkpoints as they were."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

import vlmdata.model.training.checkpoints.checkpoint
from tests.conftest import tree_bytes
from vlmdata.errors import ResourceError
from vlmdata.model.training.checkpoints.folder import remove
from vlmdata.model.training.settings.config import ConfigError
from vlmdata.model.weights.places import checkpoints_in

pytestmark = pytest.mark.slow

KIB = 1024


def kib_of(folder: Path) -> int:
    """KiB that a folder's files take, as a file system counts."""
    return sum(file.stat().st_blocks for file in folder.rglob("*")) // 2


@pytest.mark.parametrize(("in_background", "sharded"), [(False, False), (True, False), (False, True), (True, True)])
def test_a_disk_that_fills_up_ends_the_run_and_keeps_the_checkpoints(
    run: Any, small_disk: Callable[..., Path], in_background: bool, sharded: bool
) -> None:
    folder = small_disk(400 * KIB, "run/checkpoints")
    settings = {"run__save_every": 1, "run__async_save": in_background, "parallel__fsdp": sharded}
    run(run__steps=1, **settings)
    before, size = tree_bytes(folder), kib_of(folder)

    # Tensors alone would fit a second time, but not all that is written around them: it ends in the midst of a file.
    tensors = sum(_tensor_bytes(folder / "step-00000001")) // KIB
    small_disk(size + tensors + 100, "run/checkpoints")
    what = rf"{folder}: a checkpoint of {tensors * KIB / 1e6:.1f} MB could not be saved"
    with pytest.raises(ResourceError, match=rf"{what}: {os.strerror(errno.ENOSPC)}; [0-9.]+ MB free") as caught:
        run(resume=True, run__steps=2, **settings)
    message = str(caught.value)
    assert "step-00000001 is the newest complete one" in message
    assert "Free space or fix permissions" in message
    assert tree_bytes(folder) == before

    if not in_background:  # less than that is seen before a byte is written
        small_disk(size + tensors - 100, "run/checkpoints")
        room = f"{(tensors - 100) * KIB / 1e6:.1f} MB free"
        with pytest.raises(ResourceError, match=f"{what}: not enough disk space; {room}"):
            run(resume=True, run__steps=2, **settings)
        assert tree_bytes(folder) == before
        return

    small_disk(400 * KIB, "run/checkpoints")
    # As a run leaves it that is killed while it saves.
    (folder / ".step-00000007.tmp").mkdir()
    (folder / ".step-00000007.tmp" / "__0_0.distcp").write_bytes(b"half")
    assert run(resume=True, run__steps=2, **settings).steps == 2
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000001", "step-00000002"]


def _tensor_bytes(checkpoint: Path) -> Iterator[int]:
    from megatron.core import dist_checkpointing

    for tensor in dist_checkpointing.load_plain_tensors(str(checkpoint)).values():
        yield tensor.nbytes if isinstance(tensor, torch.Tensor) else 0


def test_a_folder_that_cannot_be_written_is_reported_before_the_first_step(run: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match=r"run\.out .*file/run cannot be written: Not a directory.*choose another"):
        run("file/run")


def test_a_file_is_no_folder_for_a_run(run: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.out .*/file is a file; choose another --out"):
        run("file")


def test_a_lock_that_cannot_be_written_is_reported(run: Any, tmp_path: Path) -> None:
    (tmp_path / "run" / ".lock").mkdir(parents=True)
    with pytest.raises(ResourceError, match=r"run/\.lock cannot be written: Is a directory; choose another --out"):
        run(run__steps=1)


def test_a_folder_that_can_no_longer_be_written_ends_the_run(run: Any, tmp_path: Path) -> None:
    """A file where checkpoints go: permissions, which do not bind root, end in the same place."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("")
    with pytest.raises(
        ResourceError, match=r"checkpoints: a checkpoint of .* could not be saved: Not a directory.*there is none yet"
    ):
        run(run__steps=1)


def test_a_save_that_fails_while_there_is_room_does_not_ask_for_room(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As megatron-core's queue of results fails when the process behind it was killed."""

    def refused(*_: Any, **__: Any) -> None:
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))

    monkeypatch.setattr(vlmdata.model.training.checkpoints.checkpoint.dist_checkpointing, "save", refused)
    with pytest.raises(ResourceError, match="could not be saved: ConnectionRefusedError") as caught:
        run(run__steps=1)
    message = str(caught.value)
    assert message.endswith(
        "The folder accepts files. Continue with --resume; if it happens again, set run.async_save=false"
    )
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_a_run_that_is_killed_while_it_removes_a_checkpoint_leaves_none_without_weights(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed when some files of it are gone: what is left is no checkpoint, and the next start removes it."""
    run(run__steps=2, run__save_every=1)
    folder = tmp_path / "run" / "checkpoints"

    def killed(path: Path, *_: Any, **__: Any) -> None:
        if (Path(path) / "run.json").exists():
            next(Path(path).glob("*.distcp")).unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            run(resume=True, run__steps=3, run__save_every=1)
    left = checkpoints_in(folder)
    assert [path.name for path in left] == ["step-00000002", "step-00000003"]
    assert all(list(path.glob("*.distcp")) for path in left)
    assert (folder / ".step-00000001.removed").exists()
    run(resume=True, run__steps=4)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000003", "step-00000004"]


def test_a_half_removed_checkpoint_does_not_keep_another_of_its_step_from_being_removed(tmp_path: Path) -> None:
    for name in ("step-00000003", ".step-00000003.removed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    remove(tmp_path / "step-00000003")
    assert list(tmp_path.iterdir()) == []
