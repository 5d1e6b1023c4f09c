"""Mixtures that change in mid-run: no use of a sample is repeated or skipped, and resuming changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.packing.helpers import make_table, pack_sets, uses
from vlmdata.errors import UsageError
from vlmdata.packing import Blend, Change, EpochPlan, PlanConfig, RunPlans, SampleTable, Stage, concatenate_tables
from vlmdata.packing.plan.blend import usable_samples
from vlmdata.packing.plan.epoch import plan_epoch
from vlmdata.packing.plan.run import settings_at

SIZES = (9, 14, 5)
EPOCHS = 5
TABLES = [make_table(np.random.default_rng(k).integers(5, 40, size), shard_size=4) for k, size in enumerate(SIZES)]


@dataclass
class Run:
    """How often a run used each sample, by (dataset, number in it)."""

    counts: Counter[tuple[int, int]] = field(default_factory=Counter)

    def use(self, plan: EpochPlan, datasets: tuple[int, ...], steps: int, whole: bool = True) -> None:
        """Makes the first steps of a plan, which must know exactly what was used before.

        A plan that a change cuts has some of the uses of its epoch only.
        """
        packs = named(plan, datasets)
        repeats: dict[tuple[int, int], list[int]] = {}
        for dataset, index, repeat in chain.from_iterable(packs):
            repeats.setdefault((dataset, index), []).append(repeat)
        for sample, of_sample in repeats.items():
            expected = range(self.counts[sample], self.counts[sample] + len(of_sample))
            assert sorted(of_sample) == list(expected) if whole else min(of_sample) >= expected.start
        made = chain.from_iterable(packs[: steps * plan.config.global_batch])
        self.counts.update((dataset, index) for dataset, index, _ in made)


@st.composite
def mixtures(draw: st.DrawFn, count: int) -> Blend | None:
    if draw(st.booleans()):
        return None
    weights = draw(st.lists(st.sampled_from([0.0, 0.3, 1.0, 2.5]), min_size=count, max_size=count).filter(any))
    caps = draw(st.lists(st.sampled_from([None, None, 3, 4]), min_size=count, max_size=count))
    by = draw(st.sampled_from(["epochs", "tokens", "samples", "targets"]))
    return Blend(by, tuple(weights), tuple(caps), draw(st.sampled_from([None, None, 30])))


@st.composite
def settings_of(draw: st.DrawFn, count: int) -> PlanConfig:
    return PlanConfig(
        capacity=draw(st.sampled_from([40, 64, 100])),
        global_batch=draw(st.sampled_from([1, 2])),
        seed=draw(st.integers(0, 3)),
        blend=draw(mixtures(count)),
        shuffle_window=draw(st.sampled_from([None, 2])),
    )


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[tuple[int, ...], PlanConfig, int, float]]:
    """For each stage: its datasets, settings, whole epochs, and share of one more epoch."""
    datasets = tuple(draw(st.permutations(range(3)))[: draw(st.integers(1, 3))])
    found = []
    for _ in range(draw(st.integers(2, 4))):
        found.append((datasets, draw(settings_of(len(datasets))), draw(st.integers(0, 2)), draw(st.floats(0, 1))))
        # Datasets are added, and those that were there stay, with weight 0 if they are not wanted.
        new = [each for each in range(3) if each not in datasets]
        datasets = (*datasets, *new[: draw(st.integers(0, len(new)))])
        if draw(st.booleans()):
            datasets = tuple(draw(st.permutations(datasets)))
    return found


@settings(max_examples=25)
@given(histories())
def test_no_use_is_repeated_or_skipped_across_changes(
    history: list[tuple[tuple[int, ...], PlanConfig, int, float]],
) -> None:
    run, earlier, made = Run(), (), []
    before: tuple[int, ...] = history[0][0]
    for datasets, given_config, whole, share in history:
        table = concatenate_tables([TABLES[each] for each in datasets])
        moved = [replace(each, datasets=tuple(datasets.index(before[d]) for d in each.datasets)) for each in earlier]
        config = replace(given_config, earlier=tuple(moved))
        plans = RunPlans(table, config)
        start = epoch = config.first_epoch
        for _ in range(whole):
            plan = plans[epoch]
            run.use(plan, datasets, plan.num_steps)
            least_used_first(run, table, datasets, config, plan)
            made.append((epoch, named(plan, datasets)))
            epoch += 1
        steps = int(share * plans[epoch].num_steps)
        run.use(plans[epoch], datasets, steps)
        if steps:
            packs = steps * config.global_batch
            made.append((epoch, named(plans[epoch], datasets)[:packs]))
        before, earlier = datasets, config.earlier
        if (epoch, steps) > (start, 0):
            stage = Stage(replace(config, earlier=()), tuple(range(len(datasets))), epoch, steps)
            earlier = (*earlier, stage)
    # Whoever has the last settings knows all that was before.
    last = PlanConfig(capacity=40, global_batch=1, earlier=earlier)
    for epoch, packs in made:
        assert [set(each) for each in named(plan_epoch(table, last, epoch), datasets)] == [set(each) for each in packs]


def named(plan: EpochPlan, datasets: tuple[int, ...]) -> list[list[tuple[int, int, int]]]:
    packs = [plan.pack(number) for number in range(plan.num_packs)]
    return [
        [(datasets[d], int(i), int(r)) for d, i, r in zip(pack.dataset, pack.index, pack.repeats, strict=True)]
        for pack in packs
    ]


def least_used_first(
    run: Run, table: SampleTable, datasets: tuple[int, ...], config: PlanConfig, plan: EpochPlan
) -> None:
    """At the end of an epoch, no sample was used in it that others with fewer uses should have come before."""
    offsets = table.dataset_offsets()
    for number, samples in enumerate(usable_samples(table, config.blend)):
        counts = np.array([run.counts[datasets[number], int(each)] for each in samples - offsets[number]])
        now = np.isin(samples, plan.samples)
        if now.any():
            assert counts[now].max() <= counts.min() + 1


@settings(max_examples=15)
@given(st.data(), settings_of(3), st.lists(st.integers(1, 20), max_size=3, unique=True), st.integers(0, EPOCHS - 1))
def test_a_schedule_is_a_function_of_the_step(
    data: st.DataObject, config: PlanConfig, steps: list[int], resumed: int
) -> None:
    table = concatenate_tables(TABLES)
    changes = tuple(
        Change(step, data.draw(mixtures(3)), data.draw(st.none() | st.integers(0, 3))) for step in sorted(steps)
    )
    config = replace(config, schedule=changes)
    run, plans, at = Run(), RunPlans(table, config), 0
    for epoch in range(EPOCHS):
        plan = plans[epoch]
        assert plans.steps_before(epoch) == at
        wanted = settings_at(config, at)
        assert (plan.config.blend, plan.config.seed) == (wanted.blend, wanted.seed)
        cut = at + plan.num_steps in steps
        run.use(plan, (0, 1, 2), plan.num_steps, whole=not cut)
        at += plan.num_steps
    assert all(
        change.step in {plans.steps_before(epoch) for epoch in range(EPOCHS + 1)}
        for change in changes
        if change.step < at
    )
    # The settings up to an epoch and its number of steps are enough to go on there, and so is nothing at all.
    there = RunPlans(table, plans.settled_before(resumed), known=(resumed, plans.steps_before(resumed)))
    for again in (there, RunPlans(table, config)):
        for epoch in (EPOCHS - 1, resumed):
            assert pack_sets(again[epoch]) == pack_sets(plans[epoch])
    # Without a schedule, the settled settings make the same plans.
    assert [uses(plan_epoch(table, plans.config, epoch)) for epoch in range(EPOCHS)] == [
        uses(plans[epoch]) for epoch in range(EPOCHS)
    ]


def test_settings_with_history_come_back_from_json() -> None:
    stage = Stage(PlanConfig(64, 2, blend=Blend("targets", (1, 2), (None, 5), 30)), (1, 0), 2, 3)
    config = PlanConfig(64, 2, schedule=(Change(9, None), Change(11, Blend("epochs", (1, 1)), 4)), earlier=(stage,))
    assert PlanConfig.from_dict(config.to_dict()) == config


def test_states_of_earlier_versions_have_the_same_settings() -> None:
    assert not {"schedule", "earlier"} & PlanConfig(64, 2).to_dict().keys()
    assert Blend("tokens", (1, 2)).to_dict() == {"by": "tokens", "weights": [1.0, 2.0]}


def test_shares_of_targets_are_realised() -> None:
    table = concatenate_tables(TABLES)
    plans = RunPlans(table, PlanConfig(100, 1, blend=Blend("targets", (1, 0, 3))))
    targets = np.zeros(3)
    for epoch in range(20):
        samples = plans[epoch].samples
        targets += np.bincount(table.dataset[samples], weights=table.num_targets[samples], minlength=3)
    assert targets / targets.sum() == pytest.approx([0.25, 0, 0.75], abs=0.01)


def test_max_samples_are_always_the_same_ones() -> None:
    table = concatenate_tables(TABLES)
    few, more = (usable_samples(table, Blend("epochs", (1, 1, 1), (None, most, None)))[1].tolist() for most in (4, 10))
    assert len(few) == 4
    assert set(few) < set(more)
    used = {
        sample
        for seed in range(3)
        for sample in plan_epoch(
            table, PlanConfig(100, 1, seed=seed, blend=Blend("epochs", (0, 3, 0), (None, 4, None))), 0
        ).samples.tolist()
    }
    assert used == set(few)


def test_a_long_sample_that_no_epoch_uses_is_no_error() -> None:
    table = make_table([10, 500, 20])
    plan = plan_epoch(table, PlanConfig(64, 1, blend=Blend("epochs", (1,), max_length=64)), 0)
    assert sorted(plan.samples.tolist()) == [0, 2]
    with pytest.raises(UsageError, match="1 sample longer than capacity 64"):
        plan_epoch(table, PlanConfig(64, 1), 0)


def test_a_long_sample_of_a_later_mixture_is_refused_at_the_start() -> None:
    table = concatenate_tables([make_table([10, 20]), make_table([500])])
    later = PlanConfig(64, 1, blend=Blend("epochs", (1, 0)), schedule=(Change(99, Blend("epochs", (1, 1))),))
    with pytest.raises(UsageError, match=r"1 sample longer than capacity 64 .*: the 2nd"):
        RunPlans(table, later, lambda position: f"the {position}nd")


def config_of(**options: Any) -> PlanConfig:
    return PlanConfig(64, 1, **options)


def ended(datasets: tuple[int, ...], epoch: int, step: int, **options: Any) -> tuple[Stage, ...]:
    return (Stage(config_of(**options), datasets, epoch, step),)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Blend("tokens", (1, 2), (3,)), "1 max_samples for 2 weights"),
        (lambda: Blend("tokens", (1,), (0,)), "max_samples is 0"),
        (lambda: Blend("tokens", (1,), max_length=0), "max_length is 0"),
        (lambda: Change(0, None), "changes at step 0"),
        (lambda: config_of(schedule=(Change(5, None), Change(5, None))), r"changes at steps \[5, 5\]"),
        (lambda: config_of(earlier=ended((0,), 0, 0)), r"\[\(0, 0\)\]"),
        (lambda: ended((0,), 1, 0, schedule=(Change(5, None),)), "scheduled ones themselves"),
        (lambda: ended((0, 0), 1, 0), r"datasets \[0, 0\]"),
        (lambda: config_of(earlier=ended((0,), 0, -1)), "step -1; both count from 0"),
    ],
)
def test_impossible_settings_are_refused(make: Callable[[], Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        make()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"blend": Blend("tokens", (1,), max_length=1)},
            "dataset 0 has weight 1, but no tokens in samples of at most 1",
        ),
        ({"schedule": (Change(5, Blend("tokens", (1, 1))),)}, "2 weights for 1 dataset"),
        (
            {"schedule": (Change(99, Blend("epochs", (0.01,))),)},
            "an epoch has no samples: 9 samples in total",
        ),
        ({"earlier": ended((0,), 0, 99)}, "changed at step 99 of epoch 0, which has"),
        ({"earlier": ended((3,), 1, 0)}, "dataset 3; there are 1"),
    ],
)
def test_mixtures_that_do_not_fit_the_data_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        RunPlans(TABLES[0], config_of(**options))[2]
    with pytest.raises(UsageError, match="no schedule"):
        plan_epoch(TABLES[0], config_of(schedule=(Change(5, None),)), 0)
