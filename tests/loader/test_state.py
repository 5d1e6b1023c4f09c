"""The loader's state: small, plain, the same everywhere, and refused where it does not belong."""

from __future__ import annotations

import json
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.loader.helpers import packs_of, stream
from vlmdata.errors import ConfigMismatchError, DatasetFormatError, UsageError
from vlmdata.format.manifest import Manifest
from vlmdata.loader.loader import StreamingLoader
from vlmdata.packing.config import Blend


def state_after(batches: int, data: Any, **options: Any) -> dict[str, Any]:
    with stream(data, parts=(), **options) as loader:
        for _ in islice(loader, batches):
            pass
        return loader.state_dict()


def refusal(state: dict[str, Any], data: Any, **options: Any) -> str:
    with stream(data, parts=(), **options) as loader, pytest.raises(ConfigMismatchError) as refused:
        loader.load_state_dict(state)
    return str(refused.value)


def test_it_is_small_and_json(chat: Path, receipts: Path) -> None:
    state = state_after(5, [chat, receipts], blend=Blend("tokens", (0.3, 0.7)))
    text = json.dumps(state)
    assert len(text) < 4096
    assert json.loads(text) == state


def test_it_does_not_grow(chat: Path) -> None:
    assert len(json.dumps(state_after(0, chat))) == len(json.dumps(state_after(9, chat)))


def test_between_steps_every_rank_has_the_same_one(chat: Path) -> None:
    states = [state_after(2, chat, dp_rank=rank, dp_size=2) for rank in range(2)]
    assert states[0] == states[1]
    assert (states[0]["step"], states[0]["micro_batch"]) == (1, 0)


def test_parallel_layouts_and_workers_are_no_part_of_it(chat: Path) -> None:
    state = state_after(4, chat, context_parallel=2)
    with stream(
        chat, context_parallel=2, context_parallel_rank=1, dp_size=4, dp_rank=2, prefetch_factor=3, verify=False
    ) as loader:
        loader.load_state_dict(state)
        assert next(iter(loader)).step == 1


def test_a_dataset_may_move(chat: Path, chat_copy: Path) -> None:
    with stream(chat_copy, parts=()) as loader:
        loader.load_state_dict(state_after(3, chat))
        assert packs_of(loader)[0][1] == 0


def test_within_a_step_the_number_of_ranks_is_fixed(chat: Path) -> None:
    message = refusal(state_after(1, chat, dp_size=2), chat, dp_size=4)
    assert "dp_size: 2 -> 4, within step 0" in message


@pytest.mark.parametrize(
    ("option", "listed"),
    [
        ({"capacity": 1000}, "capacity: 832 -> 1000"),
        ({"global_batch": 8}, "global_batch: 4 -> 8"),
        ({"seed": 3}, "seed: 0 -> 3"),
        ({"max_patches": 300}, "max_patches: 200 -> 300"),
        ({"pad_multiple": 4}, "alignment: 1 -> 4"),
        ({"pad_to_capacity": True}, "pad_to_capacity: False -> True"),
        ({"last": "drop"}, "last: pad -> drop"),
        ({"shuffle_window": 2}, "shuffle_window: None -> 2"),
        ({"blend": Blend("epochs", (2,))}, "blend"),
    ],
)
def test_another_plan_is_refused(chat: Path, option: dict[str, Any], listed: str) -> None:
    message = refusal(state_after(4, chat), chat, **option)
    assert listed in message
    assert ("begin a run with a pad_multiple for all of them" in message) is ("pad_multiple" in option)


@pytest.mark.parametrize(
    ("option", "listed"), [({"balance": False}, "balance: True -> False"), ({"cost": "9b"}, "cost")]
)
def test_who_runs_which_pack_may_change_between_steps_only(chat: Path, option: dict[str, Any], listed: str) -> None:
    assert listed in refusal(state_after(1, chat), chat, **option)
    between = state_after(4, chat)

    def rest(**options: Any) -> list[tuple[int, int, tuple[str, ...]]]:
        packs = []
        for rank in range(2):
            with stream(chat, parts=(), dp_rank=rank, dp_size=2, **options) as loader:
                loader.load_state_dict(between)
                packs += packs_of(loader)
        return sorted(packs)

    assert rest(**option) == rest()


def test_every_difference_is_listed(chat: Path, receipts: Path) -> None:
    message = refusal(state_after(1, [chat, receipts], dp_size=2), receipts, capacity=1000, seed=9)
    for difference in ("capacity: 832 -> 1000", "seed: 0 -> 9", "datasets: 2 -> 1", "dataset 0", "dp_size: 2 -> 1"):
        assert difference in message
    assert str(chat) in message


def test_changed_data_is_refused_and_named(chat: Path, receipts: Path) -> None:
    message = refusal(state_after(1, chat), receipts)
    old, new = Manifest.read(chat).fingerprint, Manifest.read(receipts).fingerprint
    assert f"dataset 0 ({chat}): content {old[:16]} -> {new[:16]} ({receipts})" in message


def test_a_refused_state_changes_nothing(chat: Path) -> None:
    state = state_after(3, chat, seed=1)
    with stream(chat, parts=()) as loader:
        list(islice(loader, 2))
        before = loader.state_dict()
        with pytest.raises(ConfigMismatchError):
            loader.load_state_dict(state)
        assert loader.state_dict() == before
        assert packs_of(loader)[0] == packs_of(stream(chat, parts=()))[2]


def test_a_state_of_a_later_version_is_refused(chat: Path) -> None:
    assert "version 2" in refusal({**state_after(1, chat), "version": 2}, chat)


def test_what_is_no_state_is_refused(chat: Path) -> None:
    with stream(chat) as loader:
        state = loader.state_dict()
        for text in (None, json.dumps(state)):
            with pytest.raises(UsageError, match=r"it must be what state_dict\(\) returned, a dictionary"):
                loader.load_state_dict(text)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="the loader state has no 'step'"):
            loader.load_state_dict({name: value for name, value in state.items() if name != "step"})
        with pytest.raises(UsageError, match=r"micro_batch=-1\); all three count from 0"):
            loader.load_state_dict({**state, "micro_batch": -1})


def test_datasets_of_different_tokenizers_are_refused_by_name(chat: Path, chat_copy: Path) -> None:
    path = chat_copy / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["tokenizer"] |= {"fingerprint": "f" * 64, "name": "another/tokenizer"}
    path.write_text(json.dumps(manifest))
    with pytest.raises(ConfigMismatchError) as refused:
        StreamingLoader([chat, chat_copy], capacity=832, global_batch=1)
    for name in (str(chat), str(chat_copy), "another/tokenizer", Manifest.read(chat).tokenizer.name, "f" * 16):
        assert name in str(refused.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dp_rank": 2, "dp_size": 2}, "dp_rank 2 of dp_size 2"),
        ({"dp_size": 3}, "global_batch 4 is not a multiple of dp_size 3"),
        ({"context_parallel": 2, "context_parallel_rank": 2}, "context_parallel_rank 2 of context_parallel 2"),
        ({"parts": ("tokens", "pictures")}, "'pictures' is not one of tokens, labels, pixels"),
        ({"last": "half"}, "half"),
        ({"num_workers": -1}, "num_workers is -1"),
        ({"prefetch_factor": 0}, "prefetch_factor is 0"),
        ({"timeout": 0}, "timeout is 0"),
        ({"cost": "900b"}, "900b"),
        ({"blend": Blend("epochs", (1, 1))}, "2 weights for 1 dataset"),
        ({"data": []}, "no datasets"),
    ],
)
def test_options_that_cannot_be_are_refused_at_once(chat: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stream(options.pop("data", chat), **options)


def test_a_sample_over_capacity_is_named_at_once(chat: Path, receipts: Path) -> None:
    lengths = {key: length for key, length in _lengths(chat) if length > 400}
    with pytest.raises(ValueError, match=f"{len(lengths)} sample") as refused:
        stream(chat, capacity=400)
    for key, length in lengths.items():
        assert f"{key} ({length} tokens" in str(refused.value)
    with pytest.raises(ValueError) as refused:
        stream([receipts, chat], capacity=400)
    assert f"{chat}:{next(iter(lengths))}" in str(refused.value)


def _lengths(data: Path) -> list[tuple[str, int]]:
    with stream(data) as loader:
        index = loader.datasets[0].index
        return [(index.key(i), int(index.lengths[i])) for i in range(len(index))]


def test_a_folder_without_a_finished_dataset_is_refused(chat_copy: Path) -> None:
    (chat_copy / "manifest.json").unlink()
    with pytest.raises(DatasetFormatError, match="not a vlmdata dataset"):
        stream(chat_copy)
    shutil.rmtree(chat_copy)
    with pytest.raises(DatasetFormatError, match="no such directory"):
        stream(chat_copy)
