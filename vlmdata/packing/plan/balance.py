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

from vlmdata.packing.arrays import FloatArray, IntArray


def in_order(num_steps: int, packs: int, dp_size: int) -> IntArray:
    """Returns the unbalanced assignment: pack p runs in micro-batch ``p // dp_size`` on rank ``p % dp_size``.

    int64 (S, G / R, R) for S steps of G packs, a multiple of the R data-parallel ranks: positions in the step.
    """
    positions = np.arange(packs, dtype=np.int64).reshape(1, -1, dp_size)
    return np.repeat(positions, num_steps, axis=0)


def balanced(costs: IntArray, dp_size: int) -> IntArray:
    """Assigns the packs of each step so that cost is even, in O(G log G) per step.

    Costs are int64 (S, G), G a multiple of R data-parallel ranks. Returns int64 (S, G / R, R): for each (micro-batch,
    rank), the position of its pack in the step. Never a greater maximum over ranks than :func:`in_order`, and never
    both that and a greater sum over micro-batches.
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


def spread(costs: IntArray, assignment: IntArray) -> IntArray:
    """Arranges the costs of steps, int64 (S, G), as an assignment, int64 (S, M, R): (step, micro-batch, rank)."""
    flat = assignment.reshape(len(costs), -1)
    return np.take_along_axis(costs, flat, axis=1).reshape(assignment.shape)


def imbalance(costs: IntArray, assignment: IntArray) -> FloatArray:
    """Returns the maximum over ranks of total cost, divided by the mean, float64 (S,). At 2, ranks wait half the time.

    Costs are int64 (S, G), the assignment int64 (S, M, R), positions in the step. A step without cost gives 1.
    """
    return _max_over_mean(spread(costs, assignment).sum(axis=1, keepdims=True))


def micro_batch_imbalance(costs: IntArray, assignment: IntArray) -> FloatArray:
    """Returns the imbalance if ranks meet in every micro-batch: the sum of maxima over the sum of means."""
    return _max_over_mean(spread(costs, assignment))


def _is_better(costs: IntArray, candidate: IntArray, plain: IntArray) -> npt.NDArray[np.bool_]:
    """Returns, per step, if the candidate has a smaller (maximum over ranks, sum over micro-batches), in that order."""
    new, old = spread(costs, candidate), spread(costs, plain)
    new_max, old_max = new.sum(axis=1).max(axis=1), old.sum(axis=1).max(axis=1)
    new_sum, old_sum = new.max(axis=2).sum(axis=1), old.max(axis=2).sum(axis=1)
    better: npt.NDArray[np.bool_] = (new_max < old_max) | ((new_max == old_max) & (new_sum < old_sum))
    return better


def _max_over_mean(costs: IntArray) -> FloatArray:
    """Returns the sum over micro-batches of the maximum over ranks, divided by that of the means."""
    total = costs.sum(axis=(1, 2))
    return np.where(total > 0, costs.max(axis=2).sum(axis=1) * costs.shape[2] / np.maximum(total, 1), 1.0)
