"""The memory of packs never exceeds its limit."""

from __future__ import annotations

import gc
import time
from concurrent.futures import Future
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmdata.errors import UsageError
from vlmdata.service.answer import Answers
from vlmdata.service.filling import LateFillError
from vlmdata.service.memory import BusyError, PackMemory
from vlmdata.service.packs import Packs

MIB = 1 << 20


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 9 * MIB), st.booleans()), max_size=30))
def test_is_within_the_limit_whatever_is_asked_for(asked: list[tuple[int, bool]]) -> None:
    kept = []
    memory = PackMemory(24 * MIB, lambda: bool(kept) and kept.pop(0) is not None)
    try:
        for size, keep in asked:
            array = memory.array(memory.acquire(size, time.monotonic()))
            array[0] = array[size - 1] = 1
            assert memory.total_bytes <= 24 * MIB
            assert memory.bytes_in_use <= memory.total_bytes
            if keep:
                kept.append(array)
        kept.clear()
        array = None
        gc.collect()
        assert memory.bytes_in_use == 0
    finally:
        memory.close()


def test_a_query_waits_until_views_are_gone_and_not_longer_than_its_time() -> None:
    memory = PackMemory(8 * MIB, lambda: False)
    view = memory.array(memory.acquire(8 * MIB, time.monotonic()))[5:9]
    with pytest.raises(BusyError, match=f"{8 * MIB} of {8 * MIB} bytes of memory are in use"):
        memory.acquire(1, time.monotonic() + 0.1)
    del view
    memory.release(memory.acquire(1, time.monotonic() + 0.1))
    memory.close()


def test_more_than_the_limit_is_refused_at_once() -> None:
    memory = PackMemory(8 * MIB, lambda: True)
    with pytest.raises(UsageError, match="is more than the 8388608 bytes of the server's --memory that are for packs; use a smaller"):
        memory.acquire(8 * MIB + 1, time.monotonic() + 60)
    memory.close()


class _LateFillers:
    """Workers that are not done in time."""

    def __init__(self) -> None:
        self.future: Future[None] = Future()
        self.future.set_running_or_notify_cancel()

    def fill(self, *_: object) -> None:
        raise LateFillError(0.1, self.future)


def test_a_buffer_that_a_late_worker_may_write_to_is_not_used_again() -> None:
    fillers = _LateFillers()
    packs = Packs(fillers, 8 * MIB, 0.1, lambda: False)  # type: ignore[arg-type]
    request = SimpleNamespace(
        layout=SimpleNamespace(bytes=MIB, fields=()),
        position=SimpleNamespace(epoch=0),
        pack=3,
        pixels="uint8",
        of=lambda *_: request,
    )
    with pytest.raises(LateFillError, match="not read within 0 s"):
        packs.get(request, "plan", "raise")  # type: ignore[arg-type]
    assert packs.memory.bytes_in_use > 0
    fillers.future.set_result(None)
    assert packs.memory.bytes_in_use == 0
    packs.memory.close()


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
