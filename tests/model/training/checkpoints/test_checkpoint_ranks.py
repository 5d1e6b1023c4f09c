"""Checkpoints of several ranks: one folder for all, one end of all, and weights that are complete when saved."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from megatron.core import dist_checkpointing

from tests.model.training.conftest import steps_of
from tests.model.training.ranks import Ranks, arguments_of

pytestmark = pytest.mark.slow


def test_of_different_folders_are_refused(chats: Path, tmp_path: Path) -> None:
    """As on nodes whose --out is on disks of their own: the same relative path, seen from two places."""
    places = [tmp_path / "0", tmp_path / "1"]
    for place in places:
        place.mkdir()
    # Only rank 1 has something to resume; rank 0 decides for both, but not before they see the same folder.
    (places[1] / "run" / "checkpoints" / "step-00000003").mkdir(parents=True)
    ranks = Ranks(arguments_of(chats, Path("run")), tmp_path / "said", 2, folders=places, prepare=impatient)
    assert ranks.wait() == [2, 2]
    said = ranks.said(0) + ranks.said(1)
    assert said.count("error: ") == 1
    assert "run.out run is not the same folder for all processes" in said
    assert f"{places[0] / 'run'} is not visible to rank 1 on {os.uname().nodename} ({places[1] / 'run'})" in said
    assert "--out to an absolute path on storage that all nodes share" in said
    assert list((places[0] / "run").iterdir()) == []


def impatient(rank: int) -> None:
    """Does not wait for a network file system to show the file."""
    from vlmdata.model.training.processes import agreement

    agreement.PATIENCE = 0.1


def test_weights_are_complete_when_they_are_saved(tmp_path: Path) -> None:
    """The distributed optimizer with its gather left to the next forward pass, as is the default on GPUs."""
    ranks = Ranks(["dp", "tp"], tmp_path / "said", 2, script="tests/model/gpu_checkpoint.py")
    assert ranks.wait() == [0, 0], ranks.said(0) + ranks.said(1)
    assert ranks.said(0).count("are as saved") == 2


def test_settings_of_two_optimizers_in_a_chain_win(chats: Path, tmp_path: Path) -> None:
    """Experts that are spread over ranks have an optimizer of their own."""
    out = tmp_path / "run"
    options = ("--preset", "tiny-moe", "--ep", "2", "--set", "data.global_batch=2", "--set", "optimizer.warmup_steps=0")
    first = Ranks(arguments_of(chats, out, *options, "--set", "optimizer.lr=1e-3", steps=1), tmp_path / "first", 2)
    assert first.wait() == [0, 0], first.said(0) + first.said(1)
    changed = (
        *options,
        "--set",
        "optimizer.lr=5e-4",
        "--set",
        "optimizer.schedule=constant",
        "--set",
        "optimizer.eps=1e-6",
    )
    second = Ranks(arguments_of(chats, out, *changed, "--resume", steps=2), tmp_path / "second", 2)
    assert second.wait() == [0, 0], second.said(0) + second.said(1)
    assert [line["lr"] for line in steps_of(out)] == [1e-3, 5e-4]
    state = dist_checkpointing.load_common_state_dict(str(out / "checkpoints" / "step-00000002"))["optimizer"]
    assert [any(group["is_expert_parallel"] for group in state[part]["param_groups"]) for part in (0, 1)] == [
        False,
        True,
    ]
    alone = Ranks(arguments_of(chats, out, "--preset", "tiny-moe", "--resume", steps=3), tmp_path / "alone")
    assert alone.wait() == [2]
    assert "parallel.ep: 2 -> 1. Resume with the old settings, or start a new run from its weights" in alone.said(0)
    for part in (0, 1):
        assert {(group["max_lr"], group["eps"]) for group in state[part]["param_groups"]} == {(5e-4, 1e-6)}


def test_tensor_parallelism_gives_experts_an_optimizer_of_their_own(chats: Path, tmp_path: Path) -> None:
    """Like --ep above 1, --tp above 1 spreads experts over ranks. A run may change between the two, not leave them."""
    out = tmp_path / "run"
    options = ("--preset", "tiny-moe", "--set", "data.global_batch=2", "--set", "data.pad_multiple=2")
    first = Ranks(arguments_of(chats, out, *options, "--tp", "2", "--sp", steps=1), tmp_path / "first", 2)
    assert first.wait() == [0, 0], first.said(0) + first.said(1)
    alone = Ranks(arguments_of(chats, out, *options, "--resume", steps=2), tmp_path / "alone")
    assert alone.wait() == [2]
    assert "optimizer state does not fit: parallel.tp: 2 -> 1. Resume with the old settings" in alone.said(0)
    second = Ranks(arguments_of(chats, out, *options, "--ep", "2", "--resume", steps=2), tmp_path / "second", 2)
    assert second.wait() == [0, 0], second.said(0) + second.said(1)


@pytest.mark.parametrize("layout", [("--tp", "2", "--sp"), ("--set", "parallel.fsdp=true")])
def test_a_rank_that_cannot_write_ends_all_of_them(layout: tuple[str, ...], chats: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = (*layout, "--set", "data.global_batch=2")
    ranks = Ranks(arguments_of(chats, out, *options, steps=1), tmp_path / "said", 2, prepare=rank_1_writes_little)
    assert ranks.wait() == [3, 3]
    said = ranks.said(0) + ranks.said(1)
    assert said.count("error: ") == 1, said
    assert f"{out / 'checkpoints'}: a checkpoint of" in said
    assert "could not be saved: on rank 1 " in said
    assert "Traceback" not in said
    assert list((out / "checkpoints").iterdir()) == []


def rank_1_writes_little(rank: int) -> None:
    """EFBIG takes the place of ENOSPC, for one of the ranks; there is room for its batches (4 MiB)."""
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_000, 5_000_000))


def test_a_rank_that_cannot_read_ends_all_of_them(chats: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = arguments_of(chats, out, "--set", "data.global_batch=2", steps=1)
    assert Ranks(arguments, tmp_path / "first", 2).wait() == [0, 0]
    (out / "checkpoints" / "step-00000001" / "random-00001.pt").write_bytes(b"half")
    ranks = Ranks([*arguments, "--resume"], tmp_path / "second", 2)
    assert ranks.wait() == [2, 2]
    said = ranks.said(0) + ranks.said(1)
    assert said.count("error: ") == 1, said
    assert "cannot be loaded; its files seem damaged" in said
