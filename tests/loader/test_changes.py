"""A run that changes its data or mixture between two steps, by hand or by a schedule."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.loader.helpers import packs_of, sample_names, steps_of, stream
from tests.loader.test_config import run as run  # the fixture
from vlmdata.errors import ConfigMismatchError, UsageError
from vlmdata.loader.loader import StreamingLoader
from vlmdata.loader.run_record import RunRecord
from vlmdata.packing.config import Blend, Change

#: Packs per step on one rank.
BATCH = 4


def after(steps: int, data: Any, state: dict[str, Any] | None = None, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the samples of some steps by (epoch, step), and the state after them."""
    with stream(data, parts=(), **options) as loader:
        if state is not None:
            loader.load_state_dict(state)
        batches = steps * BATCH // loader.dp_size
        found = steps_of(islice(endless(loader), batches))
        return found, json.loads(json.dumps(loader.state_dict()))


def endless(loader: StreamingLoader) -> Any:
    while True:
        yield from loader


def test_a_run_continues_with_another_mixture(chat: Path, receipts: Path) -> None:
    """Half an epoch of chats; then with receipts, in another order, for as many steps as it takes."""
    begun, state = after(3, chat)
    used: Counter[str] = Counter(name for step in begun.values() for _, name in step.elements())
    new = {"blend": Blend("samples", (1, 1)), "seed": 5}
    with stream([receipts, chat], parts=(), **new) as loader:
        loader.load_state_dict(state, change=True)
        assert (loader.position.epoch, loader.position.step) == (1, 0)
        assert loader.plan(0).num_steps == 3
        changed, saved = loader.state_dict(), copy.deepcopy(loader)
        shares: Counter[int] = Counter()
        while min(used.values()) < 2 or len(used) < 48:
            for batch in loader:
                shares.update(dataset for dataset, _ in sample_names(batch))
                used.update(name for dataset, name in sample_names(batch) if dataset == 1)
            assert max(used.values()) <= min(used[name] for name in loader.datasets[1].index.keys.to_pylist()) + 1
    assert shares[0] == pytest.approx(shares[1], abs=2)
    # The state after the change needs no more than the loader's own settings, on other ranks and workers too.
    expected, after_four = after(4, [receipts, chat], changed, **new)
    assert steps_of(islice(saved, 4 * BATCH)) == expected
    saved.close()
    ranks = [after(4, [receipts, chat], changed, dp_rank=rank, dp_size=2, num_workers=rank, **new) for rank in range(2)]
    assert {step: ranks[0][0][step] + ranks[1][0][step] for step in expected} == expected
    assert ranks[0][1] == ranks[1][1] == after_four | {"dp_size": 2}


def test_without_a_difference_nothing_changes(chat: Path) -> None:
    _, state = after(2, chat)
    with stream(chat, parts=()) as loader:
        loader.load_state_dict(state, change=True)
        assert loader.state_dict() == state


def test_changes_before_the_first_step_leave_nothing(chat: Path) -> None:
    with stream(chat, parts=(), seed=4) as loader:
        loader.load_state_dict(after(0, chat)[1], change=True)
        assert loader.state_dict() == after(0, chat, seed=4)[1]


def test_masked_samples_keep_their_names(chat: Path, receipts: Path) -> None:
    state = after(1, chat)[1] | {"damaged": [[0, 7]]}
    with stream([receipts, chat], parts=()) as loader:
        loader.load_state_dict(state, change=True)
        assert loader.state_dict()["damaged"] == [[1, 7]]


def test_impossible_changes_are_refused(chat: Path, receipts: Path) -> None:
    _, state = after(1, [chat, receipts])
    for data, seed, saved, problem in [
        (chat, 0, state, "the run used this dataset .* Give it with weight 0"),
        ([chat, receipts], 1, state | {"micro_batch": 2}, "may change only between steps"),
        ([chat, receipts], 1, state | {"plan": state["plan"] | {"algorithm": 1}}, "algorithm: 1 -> 5"),
    ]:
        with stream(data, parts=(), seed=seed) as loader, pytest.raises(ConfigMismatchError, match=problem):
            loader.load_state_dict(saved, change=True)
    with stream(chat, parts=(), seed=1) as loader, pytest.raises(ConfigMismatchError, match="change=True"):
        loader.load_state_dict(after(1, chat)[1])


def test_a_schedule_is_kept_across_resumes(chat: Path, receipts: Path) -> None:
    options = {
        "blend": Blend("epochs", (1, 0)),
        "schedule": [Change(2, Blend("epochs", (0, 1))), Change(5, None, seed=3)],
    }
    data = [chat, receipts]
    whole, _ = after(9, data, **options)
    datasets = [{dataset for dataset, _ in step} for step in whole.values()]
    assert datasets[:5] == [{0}, {0}, {1}, {1}, {1}]
    assert set.union(*datasets[5:]) == {0, 1}
    state, got = None, {}
    for steps in (1, 2, 1, 3, 2):
        found, state = after(steps, data, state, **options)
        got |= found
    assert got == whole
    with stream(data, parts=(), **options) as loader:
        loader.set_epoch(state["epoch"])  # from nothing
        assert loader.state_dict()["known_steps"] == state["known_steps"]


#: Steps of the chats in an epoch of half and of all of them.
HALF = 2


@st.composite
def schedules(draw: st.DrawFn) -> dict[str, Any]:
    """A mixture and its changes. Many are due exactly where an epoch begins."""
    passes = st.sampled_from([0.5, 1.0, 1.5])
    steps = draw(st.lists(st.sampled_from([1, HALF, 3, 2 * HALF, 3 * HALF]), min_size=1, max_size=3, unique=True))
    changes = [
        Change(step, Blend("epochs", (draw(passes),)), draw(st.none() | st.integers(1, 2))) for step in sorted(steps)
    ]
    return {"blend": Blend("epochs", (draw(st.just(0.5) | passes),)), "schedule": changes}


@settings(max_examples=8, deadline=None)
@given(schedules(), st.integers(0, 4 * HALF), st.integers(0, 2))
def test_a_state_says_the_same_however_far_epochs_are_planned(
    chat: Path, options: dict[str, Any], saved: int, ahead: int
) -> None:
    with stream(chat, parts=(), **options) as loader:
        batches = endless(loader)
        begun = list(islice(batches, saved * BATCH))
        state = loader.state_dict()
        loader.plan(loader.position.epoch + ahead)  # as workers that prefetch do
        assert loader.state_dict() == state
        whole = packs_of([*begun, *islice(batches, 3 * HALF * BATCH)])
    with stream(chat, parts=(), **options) as loader:
        loader.load_state_dict(json.loads(json.dumps(state)))
        assert loader.state_dict() == state
        assert packs_of([*begun, *islice(endless(loader), 3 * HALF * BATCH)]) == whole


def test_a_change_that_begins_an_epoch_remembers_what_was_used(chat: Path) -> None:
    """The second half of the samples is used after it, whichever rank and worker saved the state."""
    half = Blend("epochs", (0.5,))
    options = {"blend": half, "schedule": [Change(HALF, half, seed=9)]}
    first, state = after(HALF, chat, **options)
    ranks = [
        after(HALF, chat, dp_rank=rank, dp_size=2, num_workers=2 * rank, prefetch_factor=4, **options)[1]
        for rank in (0, 1)
    ]
    assert ranks[0] == ranks[1] == state | {"dp_size": 2}
    assert (state["epoch"], state["step"]) == (1, 0)
    second, _ = after(HALF, chat, state, **options)
    used = sum((first | second).values(), Counter())
    assert len(used) == 48
    assert set(used.values()) == {1}


@pytest.mark.parametrize("begun", [{}, {"schedule": [Change(1, None, seed=8)]}])
def test_a_schedule_begins_in_mid_run(chat: Path, receipts: Path, begun: dict[str, Any]) -> None:
    """Its steps are those of the run, which had another schedule before, or none."""
    _, state = after(3, [chat, receipts], **begun)
    later = {"schedule": [Change(2, Blend("epochs", (1, 0))), Change(4, Blend("epochs", (0, 1)))]}
    with stream([chat, receipts], parts=(), **later) as loader:
        loader.load_state_dict(state, change=True)
        found = [{d for d, _ in step} for step in steps_of(islice(endless(loader), 3 * BATCH)).values()]
    assert found == [{0}, {1}, {1}]


def test_plan_shows_a_change_before_it_is_made(
    chat: Path, receipts: Path, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    _, state = after(3, chat)
    (tmp_path / "run.json").write_text(json.dumps({"loader": state}))
    sizes = ["--capacity", 832, "--global-batch", BATCH, "--max-patches", 200]
    options = [chat, receipts, "--weights", "1,3", *sizes, "--continue", tmp_path, "--steps", 10]
    code, said, _ = run("plan", *options, "--json")
    assert code == 0
    report = json.loads(said)
    assert report["epoch"] == 1
    assert [part["first_step"] for part in report["mixture"]] == [3, 5, 7, 9, 11]
    with stream([chat, receipts], parts=(), blend=Blend("tokens", (1, 3))) as loader:
        loader.load_state_dict(state, change=True)
        samples = [Counter(d for d, _ in step.elements()) for step in steps_of(islice(endless(loader), 40)).values()]
        RunRecord.of(loader, tmp_path).write()
    for dataset in range(2):
        planned = [part["datasets"][dataset]["samples"] for part in report["mixture"]]
        assert planned == [one[dataset] + two[dataset] for one, two in zip(samples[::2], samples[1::2], strict=True)]
    assert "mixture over steps" in run("plan", *options)[1]
    # The record of the run knows of the change, so its plans are the run's.
    recorded = json.loads(run("plan", "--run", tmp_path, "--epoch", 1, "--json")[1])
    assert recorded["datasets"] == report["datasets"]
    assert run("plan", chat, *sizes, "--continue", tmp_path / "none.json")[0] == 2


def test_a_loader_refuses_what_is_no_change(chat: Path) -> None:
    with pytest.raises(UsageError, match="schedule has 5; it must be a sequence of Change"):
        stream(chat, schedule=[5])
