"""The next batches of a rank are made before it asks, within the memory, and never twice."""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.flight as flight
import pytest

from tests.service.packs import MIB, pack_request
from tests.service.servers import assert_equal, wait_until
from vlmdata import StreamingLoader
from vlmdata.errors import DatasetFormatError
from vlmdata.loader.fill.filler import Filled
from vlmdata.loader.state import Position
from vlmdata.packing.config import PlanConfig
from vlmdata.service.protocol import BatchQuery
from vlmdata.service.server.ahead import ReadAhead
from vlmdata.service.server.config import ServerConfig
from vlmdata.service.server.packs import BusyError, Packs
from vlmdata.service.server.server import CollationServer

STEPS = 9


def query(step: int, place: str = "") -> BatchQuery:
    plan = PlanConfig(64, 1)
    parts = frozenset({"tokens"})
    return BatchQuery(("a" * 64,), plan, Position(0, step), 0, 1, None, parts, "uint8", "raise", place)  # type: ignore[arg-type]


def request(step: int) -> Any:
    following = Position(0, step + 1) if step + 1 < STEPS else Position(1)
    return SimpleNamespace(position=Position(0, step), following=following, step=step)


@dataclass
class Made:
    """Stands for plans and packs; remembers which steps were made ahead."""

    steps: list[int] = field(default_factory=list)
    planned: list[int] = field(default_factory=list)

    def prepare(self, asked: Any, *given: Any) -> Any:
        if not given:
            self.planned.append(asked.position.step)
            return request(asked.position.step), "plan"
        self.steps.append(asked.step)
        return None


def ask(ahead: ReadAhead, step: int, place: str = "") -> None:
    ahead.asked(query(step, place))
    ahead.note(query(step, place), request(step))
    wait_until(lambda: not ahead._under_way, "it is not done")


@pytest.fixture
def made() -> Made:
    return Made()


class TestWhichBatches:
    def test_two_from_the_second_query_of_a_rank_on(self, made: Made) -> None:
        ahead = ReadAhead(made, made, 2, 4)  # type: ignore[arg-type]
        ask(ahead, 3)
        assert made.steps == []
        ask(ahead, 4)
        assert sorted(made.steps) == [5, 6]
        ask(ahead, 5, "f" * 64)  # wherever the client runs
        assert sorted(made.steps) == [5, 6, 7]
        assert sorted(made.planned) == [5, 6, 7]

    def test_what_is_remembered_of_queries_is_small(self, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("vlmdata.service.server.ahead._REMEMBERED", 3)
        ahead = ReadAhead(made, made, 2, 4)  # type: ignore[arg-type]
        for step in range(STEPS):
            ask(ahead, step)
        for queries in (ahead._asked, ahead._expected, ahead._begun):
            assert 0 < len(queries) <= 3
            assert all(type(each) is int for each in queries)

    def test_none_of_another_epoch(self, made: Made) -> None:
        ahead = ReadAhead(made, made, 2, 4)  # type: ignore[arg-type]
        for step in range(STEPS - 2, STEPS):
            ask(ahead, step)
        assert made.steps == []
        ask(ahead, STEPS - 3)
        ask(ahead, STEPS - 2)
        assert made.steps == []  # the last one was asked

    def test_none_for_a_rank_that_does_not_go_on(self, made: Made) -> None:
        ahead = ReadAhead(made, made, 2, 4)  # type: ignore[arg-type]
        for step in (0, 2, 4, 6, 1):
            ask(ahead, step)
        assert made.steps == [3]  # after 0 came 1

    def test_none_when_it_is_off(self, made: Made) -> None:
        ahead = ReadAhead(made, made, 0, 4)  # type: ignore[arg-type]
        for step in range(4):
            ask(ahead, step)
        assert made.steps == []

    def test_no_more_at_a_time_than_there_are_threads(self, made: Made) -> None:
        held = threading.Event()
        packs = SimpleNamespace(prepare=lambda *_: held.wait(240))
        ahead = ReadAhead(made, packs, 5, 2)  # type: ignore[arg-type]
        for step in range(2):
            ahead.asked(query(step))
            ahead.note(query(step), request(step))
        wait_until(lambda: made.planned == [2, 3], "they are not under way")
        held.set()
        wait_until(lambda: not ahead._under_way, "it is not done")
        assert made.planned == [2, 3]
        ahead.close()
        ask(ahead, 2)
        assert made.planned == [2, 3]


class Fillers:
    def fill(self, *_: object) -> Filled:
        return Filled(1)


class TestMemory:
    def test_a_third_at_most(self) -> None:
        packs = Packs(Fillers(), 24 * MIB, 0.1, frozenset, lambda: False)  # type: ignore[arg-type]
        for number in range(4):
            packs.prepare(pack_request(number), "plan", "raise")
        assert packs.counts.made == packs.counts.ahead == 2
        packs.get(pack_request(0), "plan", "raise")
        assert (packs.counts.made, packs.counts.shared) == (2, 0)
        packs.get(pack_request(0), "plan", "raise")
        assert packs.counts.shared == 1
        packs.prepare(pack_request(3), "plan", "raise")
        assert packs.counts.made == 3

    def test_ranks_that_share_a_pack_make_it_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        packs = Packs(Fillers(), 24 * MIB, 0.1, frozenset, lambda: False)  # type: ignore[arg-type]
        acquire = packs.memory.acquire

        def meanwhile(*given: Any) -> Any:
            monkeypatch.undo()
            packs.prepare(pack_request(0), "plan", "raise")  # the other rank's
            return acquire(*given)

        monkeypatch.setattr(packs.memory, "acquire", meanwhile)
        packs.prepare(pack_request(0), "plan", "raise")
        packs.get(pack_request(0), "plan", "raise")
        assert (packs.counts.made, packs.counts.ahead, packs.counts.shared) == (1, 1, 0)

    def test_packs_that_nobody_asks_for_make_room(self) -> None:
        packs = Packs(Fillers(), 12 * MIB, 0.1, frozenset, lambda: False)  # type: ignore[arg-type]
        packs.prepare(pack_request(0), "plan", "raise")
        for number in range(1, 4):
            packs.get(pack_request(number), "plan", "raise")
        assert (packs.counts.ahead, packs.counts.dropped) == (1, 1)
        packs.prepare(pack_request(9), "plan", "raise")
        assert packs.counts.ahead == 2

    def test_takes_nothing_from_clients(self) -> None:
        relieved: list[int] = []
        sending: set[int] = set()
        packs = Packs(Fillers(), 12 * MIB, 240.0, lambda: sending, lambda: bool(relieved.append(1)))  # type: ignore[arg-type]
        for number in range(3):
            sending.add(id(packs.get(pack_request(number), "plan", "raise").buffer))
        with pytest.raises(BusyError):
            packs.prepare(pack_request(3), "plan", "raise")
        assert not relieved
        sending.clear()
        packs.prepare(pack_request(3), "plan", "raise")
        assert packs.counts.ahead == 1

    def test_a_query_that_waits_for_a_damaged_pack_has_the_error(self) -> None:
        begun, go = threading.Event(), threading.Event()

        class Damaged:
            def fill(self, *_: object) -> Filled:
                begun.set()
                go.wait(240)
                raise DatasetFormatError("shard-000000.tar: damaged")

        packs = Packs(Damaged(), 12 * MIB, 240.0, frozenset, lambda: False)  # type: ignore[arg-type]
        errors: list[BaseException] = []

        def prepare() -> None:
            try:
                packs.prepare(pack_request(0), "plan", "raise")
            except DatasetFormatError as error:
                errors.append(error)

        thread = threading.Thread(target=prepare)
        thread.start()
        assert begun.wait(240)
        threading.Timer(0.05, go.set).start()
        with pytest.raises(DatasetFormatError, match="damaged"):
            packs.get(pack_request(0), "plan", "raise")
        thread.join(240)
        assert len(errors) == 1
        assert packs.memory.pool.bytes_in_use == 0
        packs.prepare(pack_request(1, 5 * MIB), "plan", "raise")  # over a third: not tried


def test_an_epoch_makes_each_pack_once(chat: Path) -> None:
    options: dict[str, Any] = {"capacity": 1024, "global_batch": 2, "seed": 31}
    with (
        closing(CollationServer([chat], ServerConfig(port=0, workers=2, memory=256 * MIB, drain=1.0))) as server,
        StreamingLoader(chat, **options) as local,
        StreamingLoader(f"grpc://127.0.0.1:{server.port}", **options) as loader,
    ):
        for one, two in zip(local, loader, strict=True):
            assert_equal(one, two)
            wait_until(lambda: not server.ahead._under_way, "it is not done")
        counts = server.packs.counts
        assert counts.made == len(local)
        assert counts.ahead == len(local) - 2  # a rank's first query is no sign, and the second is not asked ahead
        assert counts.dropped == counts.shared == 0
        remembered = dict(server.ahead._asked)
        strange = query(0)  # for a dataset that is not there
        with flight.connect(f"grpc://127.0.0.1:{server.port}") as client, pytest.raises(flight.FlightServerError):
            client.do_get(flight.Ticket(strange.encode())).read_all()
        assert server.ahead._asked == remembered
