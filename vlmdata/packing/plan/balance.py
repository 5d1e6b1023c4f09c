"""Balances a step: assigns its packs to ranks and micro-batches.

The packs of a step are fixed; this module only assigns them to (micro-batch, data-parallel rank). Ranks wait for each
other at the end of a step (gradient reduction) and, with expert parallelism, in every micro-batch. So the objective is,
first, to minimise the maximum over ranks of a rank's total cost, and second, to minimise the sum over micro-batches of
the most expensive pack.

Packs are sorted by cost and cut into micro-batches of similar packs, which minimises the second exactly. Within each
micro-batch, starting with the most expensive one, the rank with the lowest total takes the most expensive pack:
longest-processing-time-first (Graham, "Bounds on multiprocessing timing anomalies", 1969) with equal numbers of packs
per rank. If that is no better than plan order, plan order is kept.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


def in_order(num_steps: int, packs: int, dp_size: int) -> IntArray:
    """Returns the unbalanced assignment: pack p runs in micro-batch ``p // dp_size`` on rank ``p % dp_size``.

    Args:
        num_steps: Number of steps S.
        packs: Packs per step G, a multiple of ``dp_size``.
        dp_size: Data-parallel ranks R.

    Returns:
        int64 (S, G / R, R), positions in the step.
    """
    positions = np.arange(packs, dtype=np.int64).reshape(1, -1, dp_size)
    return np.repeat(positions, num_steps, axis=0)


def balanced(costs: IntArray, dp_size: int) -> IntArray:
    """Assigns the packs of each step so that cost is even, in O(G log G) per step.

    Args:
        costs: int64 (S, G), cost of each pack of each step; G a multiple of ``dp_size``.
        dp_size: Data-parallel ranks R.

    Returns:
        int64 (S, G / R, R): for each (micro-batch, rank), the position of its pack in the step. Never a greater
        maximum over ranks than :func:`in_order`, and never both that and a greater sum over micro-batches.
    """
    steps, packs = costs.shape
    micro_batches = packs // dp_size
    assert micro_batches * dp_size == packs
    plain = in_order(steps, packs, dp_size)
    if dp_size == 1:
        return plain
    dearest_first = np.argsort(-costs, axis=1, kind="stable").reshape(steps, micro_batches, dp_size)
    load = np.zeros((steps, dp_size), np.int64)
    result = np.empty_like(plain)
    for m in range(micro_batches):
        row = dearest_first[:, m]
        least_loaded = np.argsort(load, axis=1, kind="stable")
        np.put_along_axis(result[:, m], least_loaded, row, axis=1)
        load += np.take_along_axis(costs, result[:, m], axis=1)
    better = _is_better(costs, result, plain)
    return np.where(better[:, None, None], result, plain)


def rank_costs(costs: IntArray, assignment: IntArray) -> IntArray:
    """Returns the total cost of each rank.

    Args:
        costs: int64 (S, G).
        assignment: int64 (S, M, R), positions in the step.

    Returns:
        int64 (S, R).
    """
    return _spread(costs, assignment).sum(axis=1)


def imbalance(costs: IntArray, assignment: IntArray) -> npt.NDArray[np.float64]:
    """Returns the maximum over ranks of total cost, divided by the mean. At 2, ranks wait half the time.

    Args:
        costs: int64 (S, G).
        assignment: int64 (S, M, R).

    Returns:
        float64 (S,); 1 for a step without cost.
    """
    return _max_over_mean(rank_costs(costs, assignment))


def micro_batch_imbalance(costs: IntArray, assignment: IntArray) -> npt.NDArray[np.float64]:
    """Returns the imbalance if ranks meet in every micro-batch: the sum of maxima over the sum of means.

    Args:
        costs: int64 (S, G).
        assignment: int64 (S, M, R).

    Returns:
        float64 (S,); 1 for a step without cost.
    """
    spread = _spread(costs, assignment)
    total = spread.sum(axis=(1, 2))
    waiting = spread.max(axis=2).sum(axis=1) * spread.shape[2]
    return np.where(total > 0, waiting / np.maximum(total, 1), 1.0)


def _spread(costs: IntArray, assignment: IntArray) -> IntArray:
    """Arranges costs as (step, micro-batch, rank)."""
    flat = assignment.reshape(len(costs), -1)
    return np.take_along_axis(costs, flat, axis=1).reshape(assignment.shape)


def _is_better(costs: IntArray, candidate: IntArray, plain: IntArray) -> npt.NDArray[np.bool_]:
    """Returns, per step, if the candidate has a smaller (maximum over ranks, sum over micro-batches), in that order."""
    new, old = _spread(costs, candidate), _spread(costs, plain)
    new_max, old_max = new.sum(axis=1).max(axis=1), old.sum(axis=1).max(axis=1)
    new_sum, old_sum = new.max(axis=2).sum(axis=1), old.max(axis=2).sum(axis=1)
    better: npt.NDArray[np.bool_] = (new_max < old_max) | ((new_max == old_max) & (new_sum < old_sum))
    return better


def _max_over_mean(loads: IntArray) -> npt.NDArray[np.float64]:
    total = loads.sum(axis=1)
    return np.where(total > 0, loads.max(axis=1) * loads.shape[1] / np.maximum(total, 1), 1.0)
