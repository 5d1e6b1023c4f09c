"""The estimate of a vision tower on GPUs of its own."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmdata.errors import UsageError
from vlmdata.packing.config import PlanConfig
from vlmdata.packing.cost import CostModel
from vlmdata.packing.plan import EpochPlan, plan_epoch
from vlmdata.packing.split import _step_time, best_split, estimate_splits
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
    splits = estimate_splits(plan_of(48, 192, global_batch=192), gpus=8, model_parallel=1)
    assert best_split(splits).vision_gpus == 6, "three quarters of the work"
    sliced = estimate_splits(plan_of(16, 64, global_batch=64), gpus=8, model_parallel=2)
    assert [each.vision_gpus for each in sliced] == [4, 6]
    with pytest.raises(UsageError, match="2 GPUs cannot be split: a language model on 2 GPUs"):
        estimate_splits(plan_of(16, 4, global_batch=4), gpus=2, model_parallel=2)


work = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6)


@given(work=work, in_flight=st.integers(1, 4))
def test_the_time_of_a_step_is_the_longest_chain_of_its_passes(work: list[tuple[int, int]], in_flight: int) -> None:
    count = len(work)
    tower = [("F", k) for k in range(min(in_flight, count))]
    for k in range(count):
        tower += [("B", k)] + [("F", k + in_flight)] * (k + in_flight < count)
    before = dict(pairwise(reversed(tower))) | {("L", k): ("L", k - 1) for k in range(1, count)}
    needs = {("L", k): ("F", k) for k in range(count)} | {("B", k): ("L", k) for k in range(count)}
    share = {"F": Fraction(1, 3), "L": Fraction(1), "B": Fraction(2, 3)}

    @cache
    def end(task: tuple[str, int]) -> Fraction:
        kind, k = task
        begin = max((end(each[task]) for each in (before, needs) if task in each), default=Fraction(0))
        return begin + share[kind] * work[k][kind == "L"]

    found = _step_time([vision for vision, _ in work], [language for _, language in work], in_flight)
    assert found == pytest.approx(float(end(("B", count - 1))))
