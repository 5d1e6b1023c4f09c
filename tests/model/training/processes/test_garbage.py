"""Collections of garbage: none while a run starts, then only of what is new."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from vlmdata.model.training.processes.garbage import collect_after_step, collected_later, only_new_objects_collected


class Cycle:
    """Is freed by a collection only."""

    def __init__(self) -> None:
        self.self = self


def freed_by_itself(objects: int = 100_000) -> bool:
    """Whether an unreachable cycle goes while so many objects are made."""
    gone = weakref.ref(Cycle())
    kept = [[number] for number in range(objects)]
    return gone() is None and len(kept) == objects


def test_the_start_collects_nothing_and_steps_collect_what_is_new() -> None:
    before, in_use = gc.get_freeze_count(), [[number] for number in range(10_001)]
    with collected_later():
        assert not freed_by_itself()
        old, cycle = weakref.ref(Cycle()), Cycle()
        with only_new_objects_collected():
            assert old() is None, "garbage of the start is collected, not kept"
            assert gc.get_freeze_count() >= before + len(in_use)
            assert freed_by_itself()
            assert not freed_by_itself(10_000), "steps collect"
            kept = weakref.ref(cycle)
            del cycle
            gc.collect()
            assert kept() is not None, "what was in use at the start is not visited"
        assert gc.get_freeze_count() == 0
        gc.collect()
        assert kept() is None
    assert freed_by_itself()


@pytest.mark.parametrize(("step", "old"), [(99, False), (100, True)])
def test_steps_collect_what_is_new_and_now_and_then_the_rest(step: int, old: bool) -> None:
    survivor = Cycle()
    gc.collect(0)
    gc.collect(1)  # now it is among the old
    gone = weakref.ref(survivor)
    del survivor
    new = weakref.ref(Cycle())
    collect_after_step(step)
    assert new() is None
    assert (gone() is None) == old


def test_after_an_error_all_is_as_before() -> None:
    with pytest.raises(KeyError), collected_later(), only_new_objects_collected():
        raise KeyError
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold()[0] == 700


def test_a_run_steps_so(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from vlmdata.model.training.step import Stepper

    frozen: list[int] = []
    gone: list[bool] = []
    step = Stepper.launch

    def stepped(*given: Any) -> Any:
        frozen.append(gc.get_freeze_count())
        cycle = weakref.ref(Cycle())
        result = step(*given)
        gone.append(cycle() is None)
        return result

    monkeypatch.setattr(Stepper, "launch", stepped)
    run(collected=True, run__steps=2, data__global_batch=1)
    assert len(frozen) == 2
    assert gone == [True, True]
    assert min(frozen) > 100_000
    assert gc.get_freeze_count() == 0
