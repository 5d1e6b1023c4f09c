"""Data-parallel ranks: as given, else from the process group, and refused if the two disagree."""

from __future__ import annotations

import logging
import pickle
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.loader.helpers import OPTIONS, packs_of, steps_of
from vlmdata.errors import ConfigMismatchError
from vlmdata.loader import ranks
from vlmdata.loader.loader import StreamingLoader

FAST: dict[str, Any] = {**OPTIONS, "parts": ()}


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(ranks, "_told", set())


class Group:
    """Makes this process a rank of a process group whose other ranks do not exist.

    Only what is asked of torch is replaced: this process may hold a real group, of the model's tests.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._patch = monkeypatch
        self.leave()

    def __call__(self, rank: int, size: int) -> None:
        self._patch.setattr(dist, "is_initialized", lambda: True)
        self._patch.setattr(dist, "get_rank", lambda: rank)
        self._patch.setattr(dist, "get_world_size", lambda: size)

    def leave(self) -> None:
        self._patch.setattr(dist, "is_initialized", lambda: False)


@pytest.fixture(autouse=True)
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    return Group(monkeypatch)


def environment(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(size))


def test_a_lone_process_is_the_only_rank(chat: Path) -> None:
    with StreamingLoader(chat, **FAST) as loader:
        assert (loader.dp_rank, loader.dp_size) == (0, 1)


@pytest.mark.parametrize("source", ["group", "environment"])
def test_every_process_gets_samples_of_its_own(
    chat: Path, group: Group, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    with StreamingLoader(chat, **FAST) as loader:
        whole = steps_of(loader)
    batches, packs = [], set()
    for rank in range(2):
        if source == "group":
            group(rank, 2)
        else:
            environment(monkeypatch, rank, 2)
        with StreamingLoader(chat, **FAST) as loader:
            assert (loader.dp_rank, loader.dp_size) == (rank, 2)
            own = list(loader)
        assert len(own) * 2 == len(whole) * 4
        batches += own
        packs.add(tuple(map(str, packs_of(own))))
    assert len(packs) == 2
    assert steps_of(batches) == whole


def test_the_group_counts_rather_than_the_environment(
    chat: Path, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment(monkeypatch, 3, 4)
    group(1, 2)
    with StreamingLoader(chat, **FAST) as loader:
        assert (loader.dp_rank, loader.dp_size) == (1, 2)


@pytest.mark.parametrize(("rank", "size"), [("x", "2"), ("2", "2"), ("-1", "2"), ("0", "")])
def test_an_environment_that_makes_no_sense_says_nothing(
    chat: Path, monkeypatch: pytest.MonkeyPatch, rank: str, size: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with StreamingLoader(chat, **FAST) as loader:
        assert (loader.dp_rank, loader.dp_size) == (0, 1)


def test_a_loader_may_be_made_before_the_process_group(chat: Path, group: Group) -> None:
    with StreamingLoader(chat, **FAST) as loader, StreamingLoader(chat, dp_rank=1, dp_size=2, **FAST) as given:
        assert (loader.dp_size, len(loader)) == (1, 2 * len(given))
        state = loader.state_dict()
        group(1, 2)
        loader.load_state_dict(state)
        assert len(loader) == len(given)
        assert packs_of(loader) == packs_of(given)
        group.leave()
        assert (loader.dp_rank, loader.dp_size) == (1, 2), "it stays what it was in the group"


def test_a_group_set_up_within_a_step_is_refused(chat: Path, group: Group) -> None:
    with StreamingLoader(chat, **FAST) as loader:
        next(iter(loader))
        group(0, 2)
        with pytest.raises(ConfigMismatchError, match="set up within a step"):
            next(iter(loader))


def test_between_steps_it_goes_on_with_its_part(chat: Path, group: Group) -> None:
    with StreamingLoader(chat, **FAST) as loader, StreamingLoader(chat, dp_rank=0, dp_size=2, **FAST) as given:
        list(islice(loader, 4))
        group(0, 2)
        assert packs_of(loader) == packs_of(given)[2:]


def test_it_is_reported_once_and_by_rank_0(chat: Path, group: Group, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for rank in (1, 0, 0):
            group(rank, 2)
            StreamingLoader(chat, **FAST)
    assert [record.getMessage() for record in caplog.records] == [
        "dp_rank and dp_size come from the process group: each of the 2 processes is a data-parallel rank and gets "
        "its own samples. Give both to override this."
    ]


def test_ranks_that_are_given_count(chat: Path, group: Group, caplog: Any) -> None:
    group(3, 4)
    for given in ({"dp_rank": 1, "dp_size": 2}, {"dp_rank": 0, "dp_size": 1}, {"dp_size": 1}):  # pipelines, evaluation
        with StreamingLoader(chat, **FAST, **given) as loader:
            assert (loader.dp_rank, loader.dp_size) == (given.get("dp_rank", 0), given["dp_size"])
    with StreamingLoader(chat, **FAST, dp_size=4) as loader:
        assert loader.dp_rank == 3
    assert not caplog.records


def test_processes_that_share_a_pack_are_one_rank(chat: Path, group: Group) -> None:
    group(3, 4)
    with StreamingLoader(chat, **FAST, context_parallel=2, context_parallel_rank=1, tensor_parallel=2) as loader:
        assert (loader.dp_rank, loader.dp_size) == (0, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dp_rank": 0, "dp_size": 8}, "dp_size 8 does not divide the 4 processes"),
        ({"dp_rank": 1, "dp_size": 2, "tensor_parallel": 4}, r"dp_size 2 x 4 \(context x tensor parallel\) does not"),
        ({"dp_rank": 0, "dp_size": 4}, r"dp_rank is 0, but this is rank 3 of 4 .* give dp_rank=3"),
        (
            {"context_parallel": 2},
            "context_parallel 2 and tensor_parallel 1: this does not .* give dp_rank and dp_size",
        ),
        ({"dp_size": 2}, "dp_size 2 without dp_rank"),
        ({"dp_rank": 3}, "dp_rank 3 without dp_size"),
        ({"global_batch": 6}, r"global_batch 6 is not a multiple of dp_size 4 \(from the process group\)"),
    ],
)
def test_what_does_not_fit_the_group_is_refused(
    chat: Path, group: Group, options: dict[str, Any], message: str
) -> None:
    group(3, 4)
    with pytest.raises(ValueError, match=message):
        StreamingLoader(chat, **{**FAST, **options})


def test_a_pickled_loader_settles_its_rank_where_it_lands(chat: Path, group: Group) -> None:
    sent = pickle.dumps(StreamingLoader(chat, **FAST))
    group(1, 2)
    with pickle.loads(sent) as loader:
        assert (loader.dp_rank, loader.dp_size) == (1, 2)
