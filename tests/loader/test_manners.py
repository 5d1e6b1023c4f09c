"""What people who come from PyTorch expect of something that yields batches."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import vlmdata
from tests.loader.helpers import assert_same, packs_of, stream, wait_until, worker_pids
from vlmdata.errors import UsageError
from vlmdata.format.dataset import VlmDataset
from vlmdata.loader.feed.iteration import LoaderIterator, OneThread
from vlmdata.loader.state import Position

FAST: dict[str, Any] = {"parts": ()}


@pytest.mark.parametrize("last", ["pad", "keep", "drop"])
@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_the_length_is_the_batches_of_this_rank_in_the_epoch(chat: Path, last: str, dp_size: int) -> None:
    for limit in (200, 256, 320):
        with stream(chat, dp_size=dp_size, last=last, max_patches=limit, **FAST) as loader:
            for _ in range(2):
                length = len(loader)
                assert len(packs_of(loader)) == length


def test_plan_steps_and_length_are_those_of_the_current_epoch(chat: Path) -> None:
    with stream(chat, **FAST) as loader:
        for epoch in range(2):
            assert loader.plan() is loader.plan(epoch)
            assert loader.steps() == loader.steps(epoch)
            length = len(loader)
            list(islice(loader, 3))
            assert len(loader) == length, "also in its midst"
            list(loader)


class TestSetEpoch:
    def test_it_goes_to_the_start_of_that_epoch(self, chat: Path) -> None:
        with stream(chat, **FAST) as loader:
            epochs = [packs_of(loader) for _ in range(3)]
        with stream(chat, num_workers=1, **FAST) as loader:
            for epoch in (1, 0, 2):
                loader.set_epoch(epoch)
                assert packs_of(loader) == epochs[epoch]

    def test_within_that_epoch_it_stays(self, chat: Path) -> None:
        with stream(chat, **FAST) as loader:
            whole = packs_of(loader)
            loader.set_epoch(0)
            loader.set_epoch(0)
            assert packs_of(islice(loader, 5)) == whole[:5]
            state = loader.state_dict()
        with stream(chat, **FAST) as loader:
            loader.load_state_dict(state)
            loader.set_epoch(0)  # as a framework does that resumes
            assert packs_of(loader) == whole[5:]

    def test_during_a_pass_it_ends_the_pass(self, chat: Path) -> None:
        with stream(chat, **FAST) as loader:
            found = []
            for batch in loader:
                found.append(batch)
                loader.set_epoch(4)
            assert len(found) == 1
            assert loader.position == Position(4)

    def test_a_negative_one_is_refused(self, chat: Path) -> None:
        with stream(chat, **FAST) as loader, pytest.raises(ValueError, match="epoch is -1"):
            loader.set_epoch(-1)


@pytest.mark.parametrize("copied", [lambda loader: pickle.loads(pickle.dumps(loader)), copy.deepcopy])
def test_a_copy_goes_on_where_the_loader_stands(chat: Path, copied: Any) -> None:
    with stream(chat, dp_rank=1, dp_size=2, num_workers=1, blend=vlmdata.Blend("epochs", (1,))) as loader:
        with copied(loader) as fresh:
            whole = list(fresh)
        assert_same(islice(loader, 3), whole[:3])
        with copied(loader) as other:
            assert other.state_dict() == loader.state_dict()
            assert_same(other, whole[3:])
        assert_same(loader, whole[3:])


class TestDataset:
    def test_a_data_loader_yields_the_same_batches(self, chat: Path) -> None:
        with stream(chat) as loader:
            whole = list(loader)
        with stream(chat, num_workers=2) as loader:
            dataset = loader.as_dataset()
            assert isinstance(dataset, IterableDataset)
            batches = DataLoader(dataset, batch_size=None)
            assert len(batches) == len(whole)
            assert_same(batches, whole)
            assert loader.position == Position(1)
            dataset.set_epoch(0)
            assert_same(batches, whole)

    def test_endless_it_goes_on_with_the_next_epoch(self, chat: Path) -> None:
        with stream(chat, **FAST) as loader:
            epochs = [packs_of(loader) for _ in range(2)]
        with stream(chat, **FAST) as loader:
            batches = DataLoader(loader.as_dataset(endless=True), batch_size=None)
            with pytest.raises(TypeError, match="no length"):
                len(batches)
            total = len(epochs[0]) + len(epochs[1])
            assert packs_of(islice(batches, total)) == epochs[0] + epochs[1]

    def test_workers_of_the_data_loader_are_refused(self, chat: Path) -> None:
        with stream(chat) as loader:
            batches = iter(DataLoader(loader.as_dataset(), batch_size=None, num_workers=1))
            with pytest.raises(ValueError, match=r"every worker would yield all .* Use num_workers=0 here"):
                next(batches)
            batches._shutdown_workers()  # type: ignore[attr-defined]
            assert wait_until(lambda: not worker_pids(), 60)

    @pytest.mark.parametrize("stop", [0, 3, 7])
    def test_torchdata_saves_and_restores_the_position(self, chat: Path, stop: int) -> None:
        stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
        with stream(chat, **FAST) as loader:
            epochs = [packs_of(loader) for _ in range(2)]
        with stream(chat, **FAST) as loader:
            batches = stateful(loader.as_dataset(), batch_size=None)
            iterator = iter(batches)
            assert packs_of(islice(iterator, stop)) == epochs[0][:stop]
            state = batches.state_dict()
        with stream(chat, num_workers=1, **FAST) as loader:
            batches = stateful(loader.as_dataset(), batch_size=None)
            batches.load_state_dict(state)
            assert packs_of(batches) == epochs[0][stop:]
            assert packs_of(batches) == epochs[1]


def in_thread(work: Callable[[], Any]) -> Any:
    """Result or error of work in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


class TestThreads:
    @pytest.mark.parametrize("num_workers", [0, 1])
    def test_a_second_one_is_refused_and_the_first_goes_on(self, chat: Path, num_workers: int) -> None:
        with stream(chat, **FAST) as loader:
            whole = packs_of(loader)
        with stream(chat, num_workers=num_workers, **FAST) as loader:
            batches = iter(loader)
            taken = [next(batches)]
            for _ in range(2):
                with pytest.raises(UsageError, match=r"thread MainThread is iterating: one thread at a time iterates"):
                    in_thread(lambda: list(loader))
                taken.append(next(batches))
            assert packs_of([*taken, *batches]) == whole

    def test_a_shared_iterator_is_refused_while_the_other_waits(self) -> None:
        waiting, go = threading.Event(), threading.Event()

        def items() -> Iterator[int]:
            waiting.set()
            assert go.wait(60)
            yield from (1, 2)

        shared = LoaderIterator(OneThread(), items())
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(next, shared)
            assert waiting.wait(60)
            try:
                with pytest.raises(UsageError, match="one thread at a time"):
                    next(shared)
            finally:
                go.set()
            assert first.result() == 1
        assert next(shared) == 2  # one after another is no harm

    def test_one_after_another_may_iterate(self, chat: Path) -> None:
        with stream(chat, **FAST) as loader:
            whole = packs_of(loader)
        kept = []

        def leave(keep: bool) -> list[Any]:
            batches = iter(loader)
            if keep:
                kept.append(batches)
            return [next(batches)]

        with stream(chat, **FAST) as loader:
            taken = leave(keep=False)  # the iterator is gone
            taken += in_thread(lambda: leave(keep=True))  # its thread is gone
            taken += in_thread(lambda: list(loader))
            assert packs_of(taken) == whole


def test_a_sample_as_tensors_has_its_true_length_and_the_usual_dtypes(chats: VlmDataset) -> None:
    for sample in chats:
        tensors = sample.to_torch()
        assert {name: tensor.dtype for name, tensor in tensors.items()} == {
            "input_ids": torch.int64,
            "loss_mask": torch.bool,
            "position_ids": torch.int64,
            "image_grid_thw": torch.int64,
            "patches": torch.uint8,
        }
        for name, array in sample.arrays().items():
            cut = array if name in ("image_grid_thw", "patches") else array[..., : sample.length]
            assert tensors[name].tolist() == cut.tolist()
        tensors["input_ids"][0] = -1  # its own memory: the shard is mapped read-only


def test_the_package_lists_what_it_exports() -> None:
    assert set(dir(vlmdata)) == {*vlmdata.__all__, "__version__"}


def test_a_batch_and_a_loader_are_shown_in_a_line(chat: Path) -> None:
    with stream(chat, dp_rank=1, dp_size=2) as loader:
        batch = next(iter(loader))
        assert repr(loader) == (
            f"StreamingLoader('{chat}', capacity=832, global_batch=4, dp_rank=1, dp_size=2, epoch=0, step=0, "
            "micro_batch=1)"
        )
    assert repr(batch) == (
        f"PackedBatch(epoch=0, step=0, micro_batch=0, pack={batch.pack}, samples={batch.num_samples}, "
        f"tokens={batch.true_tokens} of {batch.total_tokens}, images={len(batch.image_grid_thw)}, device='cpu')"
    )
    with stream(chat, context_parallel=2, context_parallel_rank=1) as loader:
        assert ", slice 1 of 2, device='cpu')" in repr(next(iter(loader)))
