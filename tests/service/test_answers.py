"""Answers under way: what they keep, and when they let go."""

from __future__ import annotations

import gc
import multiprocessing
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from tests.service.packs import MIB, filled_pack, pack_request, whole
from tests.service.servers import wait_until
from vlmdata.loader.fill.buffers import BufferPool
from vlmdata.loader.fill.filler import Filled
from vlmdata.service.protocol import FileQuery, Header
from vlmdata.service.server.answer import Answer, Answers, SharedAnswer, pieces
from vlmdata.service.server.packs import BusyError, Fillers, Packs
from vlmdata.service.server.server import CollationServer
from vlmdata.service.shared_memory import Maps, SharedPack


def test_a_copy_on_its_way_does_not_keep_the_pack() -> None:
    pack = filled_pack(6 * MIB)
    answer = Answer(whole(pack), pack, lambda: True)
    first = next(iter(answer.batches()))
    answer.give_up()
    del pack
    gc.collect()
    assert answer.pack() is None
    del first


def test_an_answer_under_way_is_sound_after_the_server_has_closed() -> None:
    fillers: Any = SimpleNamespace(fill=lambda *_: Filled(1))
    packs = Packs(fillers, 32 * MIB, 0.1, frozenset, lambda: False)
    pack = packs.get(pack_request(0, 8 * MIB), "plan", "raise")
    pack.buffer[:] = 7
    view = pieces(whole(pack), pack)[0]
    stream = Answer(whole(pack), pack, lambda: False).batches()
    sent = [next(stream)[0]]
    maps, place = Maps(), SharedPack.of(pack.name, pack.generation, ())
    assert place is not None
    mapped = maps.memory(place)
    packs.close()
    sent += [batch for batch, _ in stream]
    assert all((batch.column(0).to_numpy() == 7).all() for batch in sent)
    assert sum(batch.num_rows for batch in sent) == 8 * MIB
    with pytest.raises(BusyError, match="stopping"):
        packs.get(pack_request(1), "plan", "raise")
    assert mapped[: place.bytes].all()
    sent.clear()
    del pack, view, stream
    gc.collect()
    assert not mapped[: place.bytes].any()  # the system has it back, although a client maps it


def test_packs_that_wait_when_the_server_ends_have_no_error_of_their_own() -> None:
    fillers = Fillers([], 1, "off", 240.0)
    fillers.close()
    with pytest.raises(BusyError, match="stopping"):
        fillers.fill(pack_request(0), BufferPool().acquire(1).name, (), "raise")


def test_a_dropped_stream_counts_no_longer() -> None:
    answers = Answers(stall=10.0, memory=8 * MIB)
    pack = filled_pack(MIB)
    answer = Answer(whole(pack), pack, lambda: False)
    answers.add(answer)
    assert answers.threads == 1
    del answer
    gc.collect()
    assert answers.threads == 0


def test_a_shared_pack_is_kept_until_the_client_ends_its_query() -> None:
    pack, looks = filled_pack(5 * MIB), iter([False, False, True])
    answer = SharedAnswer(whole(pack), pack, lambda: next(looks))
    ((batch, header),) = answer.batches()
    place = Header.decode(header.to_pybytes()).shared
    assert place is not None
    assert batch.num_rows == 0
    copied = np.zeros(5 * MIB, np.uint8)
    place.copy(np.zeros(0, np.uint8), copied, Maps())
    assert np.array_equal(copied, pack.buffer[: 5 * MIB])
    assert list(answer.last()) == []
    del pack
    answer.wait()
    assert next(looks, None) is None
    assert answer.pack() is not None
    answer.give_up()
    gc.collect()
    assert answer.pack() is None


def test_a_shared_pack_that_others_need_is_waited_for_no_longer() -> None:
    answers = Answers(stall=0.0, memory=8 * MIB)
    pack = filled_pack(MIB)
    answer = SharedAnswer(whole(pack), pack, lambda: False)
    answers.add(answer)
    assert answers.packs() == {id(pack.buffer)}
    assert answers.relieve()
    answer.wait()
    assert answers.packs() == frozenset()


def test_a_file_whose_client_stalls_ends_when_others_wait(tmp_path: Path) -> None:
    path = tmp_path / "index"
    path.write_bytes(bytes(3 * MIB))
    files = Answers(stall=0.0, memory=0)
    server: Any = SimpleNamespace(
        files=files,
        datasets=SimpleNamespace(require=lambda _: SimpleNamespace(directory=tmp_path)),
        _calls_lock=threading.Lock(),
    )
    query = FileQuery("a", "manifest.json")
    path.rename(tmp_path / "manifest.json")
    running = [CollationServer._file(server, query) for _ in range(16)]
    streams = [each.batches() for each in running]
    assert all(next(each).num_rows == MIB for each in streams)
    another = CollationServer._file(server, query)
    assert sum(each.num_rows for each in another.batches()) == 3 * MIB
    with pytest.raises(BusyError, match="read too slowly, and others wait"):
        next(streams[0])
    assert next(streams[1]).num_rows == MIB
    server.files = Answers(stall=1e9, memory=0)
    running = [CollationServer._file(server, query) for _ in range(16)]
    with pytest.raises(BusyError, match="too many files are being sent"):
        CollationServer._file(server, query)


def test_calls_that_wait_for_a_pack_count_as_calls() -> None:
    config = SimpleNamespace(max_calls=3)
    server: Any = SimpleNamespace(
        answers=Answers(10.0, 8 * MIB),
        files=Answers(10.0, 0),
        config=config,
        _calls_lock=threading.Lock(),
        _preparing=0,
    )

    def enters() -> bool:
        with suppress(BusyError), CollationServer._entered(server):
            return True
        return False

    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(CollationServer._entered(server))
        assert not enters()
    assert enters()
    server._preparing = 1
    pack = filled_pack(MIB)
    sent = [Answer(whole(pack), pack, lambda: False) for _ in range(2)]
    for each in sent:
        server.answers.add(each)
    assert not enters()
    server.answers.remove(sent[0])
    assert enters()


def test_closing_ends_the_workers() -> None:
    before = set(multiprocessing.active_children())
    fillers = Fillers([], 2, "off", 240.0)
    wait_until(lambda: len(set(multiprocessing.active_children()) - before) == 2, "both workers run")
    workers = set(multiprocessing.active_children()) - before
    fillers.close()
    assert not any(each.is_alive() for each in workers)


def test_answers_that_gave_up_still_count_as_crowd_until_they_end() -> None:
    answers = Answers(stall=0.0, memory=8 * MIB)
    buffer = np.zeros(6 * MIB, np.uint8)
    answer = Mock(pack=lambda: buffer, pack_bytes=buffer.nbytes, given_up=False, progress=0.0)
    answers.add(answer)
    assert (len(answers), answers.threads, answers.crowd()) == (1, 1, True)
    assert answers.relieve()
    assert (len(answers), answers.threads, answers.crowd()) == (0, 1, True)
    assert not answers.relieve()
    answers.remove(answer)
    assert not answers.crowd()
