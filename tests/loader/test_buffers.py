"""Buffers are reused, never too early, and nothing outlives its loader."""

from __future__ import annotations

import gc
import os
import re
import resource
from contextlib import suppress
from itertools import count, islice
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.loader.helpers import assert_same, buffer_files, epoch_of, packs_of, stream, wait_until, worker_pids
from vlmdata.errors import DatasetFormatError, ResourceError
from vlmdata.loader.fill.buffers import BufferMaps, BufferPool


@pytest.mark.parametrize("num_workers", [0, 2])
def test_kept_batches_stay_as_they_were_while_the_loader_goes_on(chat: Path, num_workers: int) -> None:
    kept, copies = [], []
    with stream(chat, num_workers=num_workers) as loader:
        for _ in range(2):
            for batch in loader:
                kept.append(batch)
                copies.append(batch.clone())
    assert_same(kept, copies)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_view_of_one_field_keeps_its_batch(chat: Path, num_workers: int) -> None:
    with stream(chat, num_workers=num_workers) as loader:
        pieces = [(batch.position_ids[1:, 0, 3:], batch.position_ids[1:, 0, 3:].clone()) for batch in loader]
        list(loader)
    for piece, copy in pieces:
        assert torch.equal(piece, copy)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_that_are_dropped_make_room_for_the_next(chat: Path, num_workers: int) -> None:
    gc.collect()  # loaders of earlier tests, held by the traceback of an expected error
    others = buffer_files()  # of batches that fixtures hold
    with stream(chat, num_workers=num_workers) as loader:
        for batch in loader:
            assert batch.total_tokens
        settled = buffer_files() - others
        # What can be under way at once: prefetched, on their way, the consumer's last two.
        most = 2 * num_workers + 5
        assert 0 < settled <= most
        for _ in range(8):
            for batch in loader:
                assert batch.total_tokens
        assert buffer_files() - others <= most  # however many epochs
    del batch
    assert wait_until(lambda: buffer_files() <= others, 60)  # the thread that hands them over ends on its own time


def test_a_consumer_that_keeps_batches_makes_the_pool_grow(chat: Path) -> None:
    with stream(chat) as loader:
        kept = list(loader)
        assert buffer_files() >= len(kept)


def test_keeping_more_than_the_system_allows_is_explained(chat: Path) -> None:
    child = os.fork()
    if child == 0:
        try:
            loader = stream(chat)
            assert sum(batch.num_samples for batch in loader) == 48  # now all shards are open
            used = {int(file) for file in os.listdir("/proc/self/fd")}
            limit = next(n for n in count() if n - sum(file < n for file in used) == 8)
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
            try:
                list(loader)
            except ResourceError as error:
                os._exit(0 if re.match(r"\d+ batches .*ulimit", str(error)) else 3)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_outlive_their_loader(chat: Path, num_workers: int) -> None:
    loader = stream(chat, num_workers=num_workers)
    batches = list(islice(loader, 3))
    copies = [batch.clone() for batch in batches]
    del loader
    gc.collect()
    epoch_of(chat)  # takes what memory was given back
    assert_same(batches, copies)


def test_a_forgotten_loader_stops_its_workers(chat: Path) -> None:
    others = buffer_files()  # of batches that fixtures hold
    loader = stream(chat, num_workers=2)
    iterator = iter(loader)
    next(iterator)
    assert len(worker_pids()) == 2
    assert buffer_files() > others
    del loader, iterator
    gc.collect()
    assert worker_pids() == []
    assert wait_until(lambda: buffer_files() <= others, 60)  # the thread that hands them over ends on its own time


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_holds_no_batch_once_it_is_dealt_with(chat_copy: Path, num_workers: int) -> None:
    (chat_copy / "shard-000005.tar").unlink()
    gc.collect()
    gc.disable()
    try:
        before = buffer_files()
        with suppress(DatasetFormatError):
            epoch_of(chat_copy, num_workers=num_workers)
        assert wait_until(lambda: buffer_files() <= before, 60)  # likewise
    finally:
        gc.enable()


def test_a_closed_loader_goes_on_when_it_is_asked_to(chat: Path) -> None:
    whole = packs_of(epoch_of(chat))
    loader = stream(chat, num_workers=1)
    before = packs_of(islice(loader, 5))
    loader.close()
    assert worker_pids() == []
    after = packs_of(loader)
    loader.close()
    loader.close()
    assert before + after == whole


def test_a_forked_copy_leaves_the_parents_workers_and_batches_alone(chat: Path) -> None:
    whole = epoch_of(chat)
    loader = stream(chat, num_workers=1)
    iterator = iter(loader)
    batches = [next(iterator)]
    child = os.fork()
    if child == 0:  # goes on by itself where the parent stood, and ends
        try:
            loader.config = stream(chat).config  # which has no workers
            same = packs_of(loader) == packs_of(whole[1:])
            loader.close()
            os._exit(0 if same else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(worker_pids()) == 1
    assert_same([*batches, *iterator], whole)
    loader.close()


def test_loading_draws_nothing_from_the_trainings_random_numbers(chat: Path) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    epoch_of(chat, num_workers=2)
    assert torch.equal(torch.get_rng_state(), before)


class TestPool:
    def test_a_buffer_in_use_is_not_given_out_again(self) -> None:
        pool = BufferPool()
        lease = pool.acquire(100)
        lease.memory()[:] = 1  # filling it does not end the lease
        array = lease.array()
        other = pool.acquire(100)
        assert other.name != lease.name
        view = array[10:20]
        del array
        assert pool.acquire(100).name not in (lease.name, other.name)
        del view
        assert pool.acquire(100).name == lease.name
        pool.close()

    def test_the_smallest_that_fits_is_taken(self) -> None:
        pool = BufferPool()
        small, large = pool.acquire(1), pool.acquire(9_000_000)
        assert large.name.bytes >= 9_000_000
        small.release()
        large.release()
        assert pool.acquire(2).name == small.name
        assert pool.acquire(5_000_000).name == large.name
        assert pool.total_bytes == small.name.bytes + large.name.bytes
        pool.close()

    def test_a_lease_ends_once(self) -> None:
        pool = BufferPool()
        lease = pool.acquire(1)
        lease.release()
        with pytest.raises(AssertionError):
            lease.array()
        pool.close()

    def test_a_workers_view_is_the_same_memory(self) -> None:
        pool, maps = BufferPool(), BufferMaps()
        lease = pool.acquire(8)
        maps.array(lease.name)[:8] = np.arange(8, dtype=np.uint8)
        assert lease.array()[:8].tolist() == list(range(8))
        pool.close()

    def test_a_late_worker_does_not_write_to_a_later_buffer(self) -> None:
        first, second = BufferPool(), BufferPool()
        name = first.acquire(1).name
        first.close()
        again = second.acquire(1).name
        assert again.path == name.path  # the same number of an open file, another file
        with pytest.raises(ResourceError, match="closed"):
            BufferMaps().array(name)
        second.close()
