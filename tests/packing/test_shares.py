"""The mixture over steps, against counting the samples of each step."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.packing.helpers import make_table
from vlmdata.packing import concatenate_tables
from vlmdata.packing.config import Blend, Change, PlanConfig
from vlmdata.packing.plan.run import RunPlans
from vlmdata.packing.plan.shares import shares_over_steps

TABLE = concatenate_tables([make_table([10] * 40), make_table([30] * 20), make_table([20] * 30)])
WEIGHTS = st.tuples(*[st.integers(1, 5)] * 3)


@settings(max_examples=40, deadline=None)
@given(
    first=WEIGHTS,
    later=st.lists(st.tuples(st.integers(1, 40), WEIGHTS), max_size=3, unique_by=lambda each: each[0]),
    steps=st.integers(1, 120),
    parts=st.integers(1, 70),
)
def test_parts_count_the_samples_of_their_steps(first, later, steps, parts) -> None:  # type: ignore[no-untyped-def]
    later = sorted(later)
    schedule = tuple(Change(step, Blend("tokens", weights)) for step, weights in later)
    config = PlanConfig(capacity=64, global_batch=2, blend=Blend("tokens", first), schedule=schedule)
    plans = RunPlans(TABLE, config)
    found = shares_over_steps(plans, 0, steps, parts)

    per_step, epoch = [], 0
    while len(per_step) < steps:
        plan = plans[epoch]
        for step in range(plan.num_steps):
            samples = np.concatenate([plan.pack(pack).samples for pack in plan.step(step)])
            per_step.append(np.bincount(TABLE.dataset[samples], minlength=3))
        epoch += 1
    at = 0
    for part in found:
        assert part.first_step == at
        expected = sum(per_step[at : at + part.steps])
        assert [each.samples for each in part.datasets] == list(expected)
        at += part.steps
    assert at == steps
    assert len(found) <= parts + len(later)
    blends = [first, *(weights for _, weights in later)]
    changes = [step for (step, new), old in zip(later, blends, strict=False) if new != old and step < steps]
    assert [part.first_step for part in found if part.changed] == changes
