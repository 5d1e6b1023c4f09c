"""A repeated sample does not meet itself in a pack, as far as there are packs."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.packing.helpers import make_table
from vlmdata.packing import Blend, PlanConfig
from vlmdata.packing.bins.two_limits import Limits, Window, pack_windows
from vlmdata.packing.plan.epoch import EpochPlan, plan_epoch
from vlmdata.packing.plan.repeats import pack_apart
from vlmdata.packing.seeding import hash64
from vlmdata.packing.table import concatenate_tables


def meetings(plan: EpochPlan) -> int:
    return sum(len(pack) - len(np.unique(pack)) for pack in np.split(plan.samples, plan.offsets[1:-1]))


@settings(max_examples=60, deadline=None)
@given(
    repeated=st.integers(1, 60),
    uses=st.integers(2, 12),
    once=st.integers(0, 600),
    longest=st.integers(1, 400),
    patches=st.booleans(),
    key=st.integers(0, 2**64 - 1),
)
def test_no_sample_meets_itself(repeated: int, uses: int, once: int, longest: int, patches: bool, key: int) -> None:
    samples = np.concatenate([np.tile(np.arange(repeated), uses), np.arange(once) + repeated])
    lengths = (hash64(repeated + once, key) % np.uint64(longest)).astype(np.int64) + 1
    counts = lengths * 4 % 97
    limits = Limits(1000, 1500 if patches else None)
    window = Window(lengths[samples], counts[samples], key)
    (bins,) = pack_apart([window], [samples], limits, key)
    assert sorted(bins.items.tolist()) == list(range(len(samples)))
    assert bins.sums(window.tokens).max() <= limits.tokens
    if limits.patches:
        assert bins.sums(window.patches).max() <= limits.patches
    (without,) = pack_windows([window], limits, key)
    groups = without.num_bins // 10
    assert bins.num_bins <= without.num_bins + max(uses, 2)  # a pack for each group at most
    if uses <= groups:
        for pack in np.split(samples[bins.items], bins.offsets[1:-1]):
            assert len(np.unique(pack)) == len(pack)


def test_a_mixture_that_repeats_a_set_keeps_its_samples_apart() -> None:
    small, large = make_table(hash64(60, 1) % 900 + 100), make_table(hash64(2000, 2) % 900 + 100)
    table = concatenate_tables([small, large])
    for blend in (Blend("epochs", (8.0, 1.0)), Blend("tokens", (1.0, 3.0))):
        plan = plan_epoch(table, PlanConfig(8192, 4, blend=blend), 0)
        assert meetings(plan) == 0
        assert plan.repeats.max() > 5
        again = plan_epoch(table, PlanConfig(8192, 4, blend=blend), 0)
        assert np.array_equal(plan.samples, again.samples)


def test_windows_without_repeats_are_packed_as_before() -> None:
    tokens = (hash64(500, 3) % 900).astype(np.int64) + 100
    windows, samples = [Window(tokens, tokens, 7)], [np.arange(500)]
    (bins,), (before,) = (
        pack_apart(windows, samples, Limits(8192, None), 5),
        pack_windows(windows, Limits(8192, None), 5),
    )
    assert np.array_equal(bins.items, before.items)
