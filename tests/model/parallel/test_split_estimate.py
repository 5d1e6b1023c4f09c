"""The estimate of a vision tower on GPUs of its own."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmdata.errors import UsageError
from vlmdata.model.parallel.split_estimate import Speeds, estimate_splits
from vlmdata.model.parallel.step_schedule import step_time
from vlmdata.packing.config import PlanConfig
from vlmdata.packing.cost import CostModel
from vlmdata.packing.plan.epoch import EpochPlan, plan_epoch
from vlmdata.packing.plan.estimates import best_split
from vlmdata.packing.table import table_from_columns

MILLION = 1 << 20


def plan_of(patches: int, packs: int, **options: object) -> EpochPlan:
    """Packs of one sample each, all equal: 16 tokens, and an image."""
    images = np.tile([1, 2, patches // 2], (packs, 1))
    table = table_from_columns(
        np.full(packs, 16), np.full(packs, 4), images, np.arange(packs + 1), np.zeros(packs, int)
    )
    cost = CostModel(6 * MILLION, 0, 0, 6 * MILLION, 0)
    return plan_epoch(table, PlanConfig(capacity=16, cost=cost, **options), 0)  # type: ignore[arg-type]


def test_equal_sides_of_many_micro_batches_hardly_wait() -> None:
    (split,) = estimate_splits(plan_of(16, 64, global_batch=64), gpus=2, model_parallel=1)
    # The first forward pass and the last backward pass of the tower are alone: the work of one micro-batch.
    assert split.vision_idle == split.language_idle == pytest.approx(1 / 65)
    assert split.speed == split.gain == pytest.approx(64 / 65)
    (few,) = estimate_splits(plan_of(16, 64, global_batch=1), gpus=2, model_parallel=1)
    assert few.speed == pytest.approx(1 / 2)
    assert few.gain is None, "one pack cannot be spread over two GPUs"


def test_the_best_split_has_the_shares_of_the_work() -> None:
    plan = plan_of(48, 192, global_batch=192)
    assert best_split(estimate_splits(plan, gpus=8, model_parallel=1, ahead=4)).vision_gpus == 6, "3/4 of the work"
    near = {each.vision_gpus: each for each in estimate_splits(plan, gpus=8, model_parallel=1, ahead=1)}
    # Two images per micro-batch, two micro-batches at a time: at most four of six GPUs have work.
    assert near[6].vision_idle > 0.25
    sliced = estimate_splits(plan_of(16, 64, global_batch=64), gpus=8, model_parallel=2)
    assert [each.vision_gpus for each in sliced] == [4, 6]
    with pytest.raises(UsageError, match="2 GPUs cannot be split: a language model on 2 GPUs"):
        estimate_splits(plan_of(16, 4, global_batch=4), gpus=2, model_parallel=2)


def test_a_tower_in_the_first_of_several_stages_slows_all_of_them() -> None:
    plan = plan_of(16, 64, global_batch=64)
    (split,) = (each for each in estimate_splits(plan, gpus=5, model_parallel=1, stages=4) if each.vision_gpus == 1)
    assert split.gain is None, "5 GPUs are no multiple of 4 stages"
    apart = estimate_splits(plan_of(16, 240, global_batch=240), gpus=8, model_parallel=1, stages=4)
    # Together, the first of four stages takes 1 + 1/4 per pack and 120 packs; apart, the tower takes 1 per pack and
    # each of its four GPUs 60 of them, as the language model takes 1/4 for each of 240.
    (half,) = (each for each in apart if each.vision_gpus == 4)
    assert half.gain == pytest.approx(2.5, rel=0.05)


def test_the_best_split_follows_the_speeds() -> None:
    plan = plan_of(48, 192, global_batch=192)
    fast = estimate_splits(plan, gpus=8, model_parallel=1, speeds=Speeds(vision=9.0, vision_together=9.0))
    assert best_split(fast).vision_gpus == 2, "a third of the time"


@st.composite
def steps(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray | None, int]:
    """Work in thirds, so that passes take whole numbers: language (n, D, S), tower (n, V) or None, and its lead."""
    count, ranks, stages, vision = (draw(st.integers(1, most)) for most in (5, 2, 3, 2))

    def work(*shape: int) -> np.ndarray:
        values = st.lists(st.integers(0, 9), min_size=int(np.prod(shape)), max_size=int(np.prod(shape)))
        return 3.0 * np.array(draw(values)).reshape(shape)

    tower = work(count, vision) if draw(st.booleans()) else None
    return work(count, ranks, stages), tower, draw(st.integers(0, 3))


@given(step=steps())
def test_the_time_of_a_step_is_the_longest_chain_of_its_passes(
    step: tuple[np.ndarray, np.ndarray | None, int],
) -> None:
    language, tower, ahead = step
    count, ranks, stages = language.shape
    # A task is (place, rank, whether backward, micro-batch); places are stages, and -1 the tower.
    before: dict[tuple[int, int, bool, int], tuple[int, int, bool, int]] = {}
    for place in range(-1 if tower is not None else 0, stages):
        for rank in range(ranks if place >= 0 else tower.shape[1]):  # type: ignore[union-attr]
            first = stages - 1 - place if place >= 0 else stages + ahead
            order = [(place, rank, False, k) for k in range(min(first, count))]
            for k in range(count):
                pair = [(place, rank, False, k + first)] * (k + first < count)
                order += [*pair, (place, rank, True, k)] if place >= 0 else [(place, rank, True, k), *pair]
            before |= dict(pairwise(reversed(order)))

    @cache
    def end(task: tuple[int, int, bool, int]) -> float:
        place, rank, backward, k = task
        earlier = end(before[task]) if task in before else 0.0
        work = language[k, rank, place] if place >= 0 else tower[k, rank]  # type: ignore[index]
        if place < 0 and not work:
            return earlier
        needs = []
        if place >= 0 and not backward:
            if place:
                needs = [(place - 1, rank, False, k)]
            elif tower is not None:
                needs = [(-1, other, False, k) for other in range(tower.shape[1]) if tower[k, other]]
        elif place >= 0:
            needs = [(place + 1, rank, True, k)] if place + 1 < stages else [(place, rank, False, k)]
        elif backward:
            needs = [(0, other, True, k) for other in range(ranks)]
        return max([earlier, *map(end, needs)]) + work / 3 * (1 + backward)

    places = [(place, rank) for place in range(stages) for rank in range(ranks)]
    places += [] if tower is None else [(-1, rank) for rank in range(tower.shape[1])]
    longest = max(end((place, rank, True, count - 1)) for place, rank in places)
    assert step_time(language, tower, ahead) == pytest.approx(longest)
