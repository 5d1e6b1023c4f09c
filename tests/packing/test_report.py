import json

import numpy as np
import pytest
from hypothesis import given, settings

from tests.packing.helpers import blended, make_table, receipts, tables
from vlmdata.packing import Blend, PlanConfig, SampleTable, plan_epoch, report_plan


@settings(max_examples=50)
@given(tables())
def test_room_is_accounted_for(table: SampleTable) -> None:
    plan = plan_epoch(table, PlanConfig(80, 4, alignment=8, max_patches=100), 0)
    found = report_plan(plan, dp_size=2)
    assert found.fill + found.alignment_waste + found.capacity_waste == pytest.approx(1)
    assert min(found.fill, found.alignment_waste, found.capacity_waste) >= 0
    assert found.tokens == table.lengths.sum()
    assert 0 < found.lower_bound <= found.packs
    assert found.naive_padded_tokens >= found.tokens
    assert found.balance.rank_after <= found.balance.rank_before
    assert 1 <= found.balance.rank_after <= found.balance.rank_after_worst


def test_numbers_by_hand() -> None:
    table = make_table([60] * 3)
    found = report_plan(plan_epoch(table, PlanConfig(80, 2, alignment=8), 0), dp_size=2)
    assert (found.packs, found.steps, found.empty_packs, found.dropped_packs) == (3, 2, 1, 0)
    assert found.fill == 180 / 240
    assert found.alignment_waste == 12 / 240
    assert found.capacity_waste == 48 / 240
    assert (found.lower_bound, found.excess) == (3, 0)
    assert found.naive_padded_tokens == 3 * 64
    assert found.naive_ratio == 1
    # One full step of two equal packs, one step with an empty pack: ratios 1 and 2.
    assert found.balance.rank_before == 1.5
    assert found.balance.rank_after_worst == 2


def test_dropped_packs_are_counted() -> None:
    found = report_plan(plan_epoch(make_table([60] * 5), PlanConfig(64, 2, last="drop"), 0))
    assert (found.steps, found.packs, found.dropped_packs, found.empty_packs) == (2, 5, 1, 0)


def test_padding_to_capacity_counts_as_compute() -> None:
    table = make_table([30, 60])
    shorter, full = (report_plan(plan_epoch(table, PlanConfig(64, 1, pad_to_capacity=pad), 0)) for pad in (False, True))
    assert shorter.naive_ratio == 1
    assert full.naive_ratio == 90 / 128


def test_naive_batches_waste_what_packs_do_not() -> None:
    found = report_plan(plan_epoch(receipts(5000), PlanConfig(8192, 32), 0), dp_size=4)
    assert found.fill > 0.99
    assert found.naive_ratio > 1.2
    assert found.balance.rank_after < found.balance.rank_before
    assert found.balance.micro_batch_after < found.balance.micro_batch_before


def test_balance_does_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_epoch(receipts(3000), PlanConfig(8192, 8), 0)
    whole = report_plan(plan, dp_size=4).balance
    monkeypatch.setattr("vlmdata.packing.plan.report._PACKS_AT_ONCE", 20)
    assert report_plan(plan, dp_size=4).balance == whole


def test_balance_agrees_with_the_assignment() -> None:
    plan = plan_epoch(receipts(3000), PlanConfig(8192, 8), 0)
    ratios = []
    for step in range(plan.num_steps):
        packs = plan.assignment(step, 4)
        loads = plan.pack_costs(packs.ravel()).reshape(packs.shape).sum(axis=0)
        ratios.append(loads.max() / loads.mean())
    assert report_plan(plan, dp_size=4).balance.rank_after == pytest.approx(np.mean(ratios))


def test_datasets_and_json() -> None:
    table = blended(40, 30)
    found = report_plan(plan_epoch(table, PlanConfig(256, 4, blend=Blend("epochs", (1, 2))), 0))
    assert [share.samples for share in found.datasets] == [40, 60]
    assert [share.passes for share in found.datasets] == [1, 2]
    assert found.datasets[1].sample_share == 0.6
    assert sum(share.tokens for share in found.datasets) == found.tokens
    assert json.loads(json.dumps(found.to_dict()))["datasets"][0]["samples"] == 40
