"""Collections of garbage: none while a run starts, then only of what is new."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from model.training.garbage import collected_later, only_new_objects_collected


class Cycle:
    """Is freed by a collection only."""

    def __init__(self) -> None:
        self.self = self


def freed_by_itself() -> bool:
    """Whether an unreachable cycle goes while other objects are made, as in steps."""
    gone = weakref.ref(Cycle())
    for _ in range(100):
        kept = [[number] for number in range(1000)]
        if gone() is None:
            return True
        del kept
    return False


def test_the_start_collects_nothing_and_steps_collect_what_is_new() -> None:
    before = gc.get_freeze_count()
    with collected_later():
        assert not freed_by_itself()
        old, cycle = weakref.ref(Cycle()), Cycle()
        with only_new_objects_collected():
            assert old() is None, "garbage of the start is collected, not kept"
            assert gc.get_freeze_count() > before + 10_000
            assert freed_by_itself()
            kept = weakref.ref(cycle)
            del cycle
            gc.collect()
            assert kept() is not None, "what was in use at the start is not visited"
        assert gc.get_freeze_count() == 0
        gc.collect()
        assert kept() is None
    assert freed_by_itself()


def test_after_an_error_all_is_as_before() -> None:
    with pytest.raises(KeyError), collected_later(), only_new_objects_collected():
        raise KeyError
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_run_steps_so(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from model.training.step import Stepper

    frozen: list[int] = []
    step = Stepper.__call__
    monkeypatch.setattr(Stepper, "__call__", lambda *given: (frozen.append(gc.get_freeze_count()), step(*given))[1])
    run(run__steps=2)
    assert len(frozen) == 2
    assert min(frozen) > 100_000
    assert gc.get_freeze_count() == 0
