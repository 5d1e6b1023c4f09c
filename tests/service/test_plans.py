"""A server's plans: each computed once, within time and memory."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.service.servers import wait_until
from vlmdata.context_parallel import Slice
from vlmdata.errors import NotFoundError, UsageError, VlmdataError
from vlmdata.format.dataset import VlmDataset
from vlmdata.loader.request.pack_request import EpochPlans
from vlmdata.loader.state import Position
from vlmdata.packing.config import Blend, PlanConfig, Stage
from vlmdata.packing.plan.epoch import EpochPlan
from vlmdata.service.protocol import BatchQuery, decode_query
from vlmdata.service.server.datasets import Datasets
from vlmdata.service.server.packs import BusyError
from vlmdata.service.server.plans import PlanBook
from vlmdata.storage.open import open_for_loading

MIB = 1 << 20


@pytest.fixture(scope="module")
def dataset(chat: Path) -> VlmDataset:
    return VlmDataset(chat)


@pytest.fixture
def book(dataset: VlmDataset) -> Callable[..., PlanBook]:
    datasets = Datasets([dataset.directory], lambda place: open_for_loading(place, None, 0))

    def make(memory: int = 16 * MIB, timeout: float = 60.0) -> PlanBook:
        return PlanBook(datasets, memory, timeout)

    return make


def query(dataset: VlmDataset, epoch: int = 0, step: int = 0, rank: int = 0, **options: Any) -> BatchQuery:
    plan = PlanConfig(**{"capacity": 1024, "global_batch": 4} | options)
    position, parts = Position(epoch, step), frozenset({"tokens"})
    return BatchQuery(
        (dataset.manifest.fingerprint,),
        plan,
        position,
        rank,
        4,
        None,
        parts,
        "uint8",
        "raise",  # type: ignore[arg-type]
    )


class Slow:
    """Plans that wait until they may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.begun: list[int] = []
        self.go = threading.Event()
        plan = EpochPlans.__getitem__

        def slow(plans: EpochPlans, epoch: int) -> EpochPlan:
            self.begun.append(epoch)
            assert self.go.wait(60)
            return plan(plans, epoch)

        monkeypatch.setattr(EpochPlans, "__getitem__", slow)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    return Slow(monkeypatch)


def test_queries_that_need_the_same_plan_wait_for_one(
    dataset: VlmDataset, book: Callable[..., PlanBook], slow: Slow
) -> None:
    plans = book()
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(plans.request, query(dataset, rank=rank)) for rank in range(4)]
        wait_until(lambda: bool(slow.begun), "nobody plans")
        other = query(dataset, epoch=1)
        asked.append(threads.submit(plans.request, other))
        slow.go.set()
        requests = [each.result()[0] for each in asked]
    assert sorted(slow.begun) == [0, 1]
    assert len({each.pack.number for each in requests[:4]}) == 4


def test_a_query_does_not_wait_for_a_slow_plan_forever(
    dataset: VlmDataset, book: Callable[..., PlanBook], slow: Slow
) -> None:
    plans = book(timeout=0.2)
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(plans.request, query(dataset, epoch)) for epoch in (0, 1)]
        wait_until(lambda: len(slow.begun) == 2, "nobody plans")
        with pytest.raises(BusyError, match="other plans were not ready in 0 s"):
            plans.request(query(dataset, epoch=2))
        with pytest.raises(BusyError, match="the plan of epoch 1 was not ready in 0 s"):
            plans.request(query(dataset, epoch=1))
        slow.go.set()
        assert all(each.result() for each in asked)
    assert plans.request(query(dataset, epoch=2))  # the failure is not kept


def test_which_rank_runs_which_pack_is_computed_once_a_step(
    dataset: VlmDataset, book: Callable[..., PlanBook], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans, computed = book(), []
    assignment = EpochPlan.assignment

    def counted(plan: EpochPlan, step: int, dp_size: int) -> Any:
        computed.append(step)
        return assignment(plan, step, dp_size)

    monkeypatch.setattr(EpochPlan, "assignment", counted)
    found = {plans.request(query(dataset, step=step, rank=rank))[0].pack.number for rank in range(4) for step in (0, 1)}
    assert computed == [0, 1]
    assert len(found) == 8


def test_a_position_beyond_the_epoch_is_refused(dataset: VlmDataset, book: Callable[..., PlanBook]) -> None:
    plans = book()
    with pytest.raises(NotFoundError, match=r"step 900 of epoch 0: it has \d+ steps"):
        plans.request(query(dataset, step=900))
    beyond = dataclasses.replace(query(dataset), position=Position(0, 0, 1))
    with pytest.raises(NotFoundError, match="the step has 1 micro-batches per rank"):
        plans.request(beyond)


class TestMemory:
    def test_a_plan_beyond_it_is_refused(self, dataset: VlmDataset, book: Callable[..., PlanBook]) -> None:
        plans = book(memory=16_000)
        assert plans.request(query(dataset))
        with pytest.raises(UsageError, match=r"planning this epoch takes \d+ bytes, more than the 16000 bytes of the "):
            plans.request(query(dataset, blend=Blend("epochs", (16.0,))))
        assert 0 < plans.bytes_in_use <= 16_000

    def test_room_in_packs_counts_as_far_as_samples_can_fill_it(
        self, dataset: VlmDataset, book: Callable[..., PlanBook], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert book(memory=16_000_000).request(query(dataset, capacity=2**29))
        monkeypatch.setattr("vlmdata.service.server.plans._uses", lambda table, config: 2**20)
        with pytest.raises(UsageError, match=r"planning this epoch takes \d{10} bytes, more than the 16000000 bytes"):
            book(memory=16_000_000).request(query(dataset, capacity=2**29))

    def test_the_plans_used_least_recently_are_forgotten(
        self, dataset: VlmDataset, book: Callable[..., PlanBook]
    ) -> None:
        plans, most = book(memory=16_000), 0
        for epoch in range(40):
            plans.request(query(dataset, epoch=epoch))
            most = max(most, plans.bytes_in_use)
        assert 5_000 < most <= 16_000

    def test_plans_that_are_computed_count(
        self, dataset: VlmDataset, book: Callable[..., PlanBook], slow: Slow
    ) -> None:
        plans = book(memory=9_000, timeout=0.2)
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(plans.request, query(dataset))
            wait_until(lambda: bool(slow.begun), "nobody plans")
            with pytest.raises(BusyError, match=r"other plans use \d+ of 9000 bytes"):
                plans.request(query(dataset, epoch=1))
            slow.go.set()
            assert asked.result()
        assert plans.request(query(dataset, epoch=1))
        assert plans.bytes_in_use <= 9_000

    def test_few_are_kept_even_if_they_are_small(
        self, dataset: VlmDataset, book: Callable[..., PlanBook], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("vlmdata.service.server.plans._KEPT", 3)
        plans = book()
        for epoch in range(6):
            plans.request(query(dataset, epoch=epoch))
        assert len(plans._plans) <= 3

    def test_queries_that_wait_do_not_drive_out_what_is_kept(
        self, dataset: VlmDataset, book: Callable[..., PlanBook], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("vlmdata.service.server.plans._KEPT", 3)
        plans = book(timeout=0.2)
        plans.request(query(dataset))
        kept = list(plans._plans)
        for epoch in range(10, 15):  # of other queries, which wait for their turn
            plans._plans[dataclasses.replace(kept[0], epoch=epoch)] = Future()
        assert plans.request(query(dataset, epoch=1))
        assert kept[0] in plans._plans


def test_requests_made_ahead_are_found_once_and_are_few(
    dataset: VlmDataset, book: Callable[..., PlanBook], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlmdata.service.server.plans._REQUESTS_KEPT", 2)
    plans = book()
    made = [plans.prepare(query(dataset, rank=rank))[0] for rank in range(3)]
    assert plans.request(dataclasses.replace(query(dataset, rank=2), place="f" * 64))[0] is made[2]
    again = plans.request(query(dataset, rank=2))[0]
    assert again is not made[2]
    assert again.pack.samples.keys == made[2].pack.samples.keys
    assert plans.request(query(dataset, rank=0))[0] is not made[0]
    monkeypatch.setattr("vlmdata.service.server.plans._MOST_SAMPLES_KEPT", 0)
    large, _ = plans.prepare(query(dataset, rank=3))
    assert plans.request(query(dataset, rank=3))[0] is not large


def leaves(values: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Places of all values in JSON values."""
    for name, value in values.items() if isinstance(values, dict) else enumerate(values):
        yield (*path, name)
        if isinstance(value, dict | list):
            yield from leaves(value, (*path, name))


@pytest.mark.parametrize("value", [None, True, "8", 1.5, -1, 10**30, [1], {}], ids=repr)
def test_a_field_of_another_type_is_refused_or_means_what_it_says(
    dataset: VlmDataset, book: Callable[..., PlanBook], value: Any
) -> None:
    """No ticket is an internal error."""
    config = PlanConfig(1024, 4, 4, max_patches=4096, shuffle_window=1, blend=Blend("epochs", (1.0,), (5,), 512))
    stage = Stage(config, (0,), 1, 0)
    plans, sound = book(), query(dataset)
    sound = replace(sound, plan=replace(config, earlier=(stage,)), context_parallel=Slice(0, 2))
    plans.request(sound)
    for place in leaves(json.loads(sound.encode())["batch"]):
        ticket = json.loads(sound.encode())
        *within, last = place
        holder = ticket["batch"]
        for name in within:
            holder = holder[name]
        holder[last] = value
        with suppress(VlmdataError):
            found = decode_query(json.dumps(ticket).encode())
            assert isinstance(found, BatchQuery)
            plans.request(found)
