import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vlmdata.packing.plan.balance import balanced, imbalance, in_order, micro_batch_imbalance, spread


@st.composite
def steps(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    dp_size, micro_batches, count = draw(st.integers(1, 6)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    cost = st.one_of(st.just(0), st.integers(0, 10**6))
    flat = draw(st.lists(cost, min_size=count * dp_size * micro_batches, max_size=count * dp_size * micro_batches))
    return np.array(flat, np.int64).reshape(count, -1), dp_size


@given(steps())
def test_every_pack_once(case: tuple[np.ndarray, int]) -> None:
    costs, dp_size = case
    assignment = balanced(costs, dp_size)
    assert assignment.shape == (len(costs), costs.shape[1] // dp_size, dp_size)
    for step in assignment:
        assert sorted(step.ravel().tolist()) == list(range(costs.shape[1]))


@given(steps())
def test_never_worse_than_plan_order(case: tuple[np.ndarray, int]) -> None:
    costs, dp_size = case
    plain, even = in_order(*costs.shape, dp_size), balanced(costs, dp_size)
    before, after = spread(costs, plain).sum(axis=1).max(axis=1), spread(costs, even).sum(axis=1).max(axis=1)
    assert (after <= before).all()
    same = after == before
    assert (micro_batch_imbalance(costs, even)[same] <= micro_batch_imbalance(costs, plain)[same]).all()


def test_plan_order_stands_where_it_is_better() -> None:
    # Rows of equals (11, 10), (9, 7), (5, 2) give 23 at best by longest-first; plan order gives 9 + 11 + 2 = 22.
    costs = np.array([[9, 7, 11, 10, 2, 5]], np.int64)
    assert spread(costs, balanced(costs, 2)).sum(axis=1).max() == 22
    assert balanced(costs, 2).tolist() == in_order(1, 6, 2).tolist()


@given(steps())
def test_steps_do_not_depend_on_their_neighbours(case: tuple[np.ndarray, int]) -> None:
    costs, dp_size = case
    together = balanced(costs, dp_size)
    for number, step in enumerate(costs):
        assert balanced(step[None], dp_size)[0].tolist() == together[number].tolist()


def test_micro_batches_hold_packs_of_like_cost() -> None:
    costs = np.array([[9, 1, 8, 2, 7, 3, 6, 4]], np.int64)
    rows = np.take_along_axis(costs, balanced(costs, 2).reshape(1, -1), axis=1).reshape(4, 2)
    assert [sorted(row) for row in rows.tolist()] == [[8, 9], [6, 7], [3, 4], [1, 2]]
    # 9 + 6 + 4 + 1 against 8 + 7 + 3 + 2.
    assert spread(costs, balanced(costs, 2)).sum(axis=1).tolist() == [[20, 20]]


def test_close_to_the_optimum_on_small_steps() -> None:
    rng = np.random.default_rng(0)
    worst = 0.0
    for _ in range(50):
        costs = rng.integers(50, 100, (1, 8))
        best = min(max(costs[0, list(half)].sum(), costs.sum() - costs[0, list(half)].sum())
                   for half in itertools.combinations(range(8), 4))  # fmt: skip
        worst = max(worst, spread(costs, balanced(costs, 2)).sum(axis=1).max() / best)
    assert worst < 1.06


def test_evens_out_realistic_steps() -> None:
    costs = np.random.default_rng(0).lognormal(10, 0.3, (200, 64)).astype(np.int64)
    before = imbalance(costs, in_order(200, 64, 8)).mean()
    after = imbalance(costs, balanced(costs, 8)).mean()
    assert before > 1.1
    assert after < 1.02


def test_ratios_by_hand() -> None:
    costs = np.array([[4, 2, 1, 1], [0, 0, 0, 0]], np.int64)
    plain = in_order(2, 4, 2)
    assert spread(costs, plain).sum(axis=1).tolist() == [[5, 3], [0, 0]]
    assert imbalance(costs, plain).tolist() == [1.25, 1.0]
    assert micro_batch_imbalance(costs, plain).tolist() == [1.25, 1.0]
    assert micro_batch_imbalance(costs[:1, [0, 2, 1, 3]], plain[:1]).tolist() == [(4 + 2) / 4]
