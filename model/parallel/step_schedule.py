"""Simulates the passes of one optimizer step: pipeline stages of a language model, and a vision tower of its own.

Each rank computes its passes in the trainer's order, one after another. A pass begins when the rank is free and the
passes that it needs have ended. Messages take no time.

Shapes: micro-batches n, ranks of the tower V, data-parallel ranks of the language model D, pipeline stages S.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

#: Share of a forward pass in the time of a forward and a backward pass.
FORWARD = 1 / 3


def step_time(language: FloatArray, tower: FloatArray | None = None, ahead: int = 1) -> float:
    """Returns when the last pass of a step ends.

    ``language`` (n, D, S) is the time of the forward and backward pass of each micro-batch, rank and stage, and
    ``tower`` (n, V) the same for the ranks of a tower of its own, if there is one, which encodes as many micro-batches
    ``ahead`` of those in the pipeline. A rank without images in a micro-batch has 0 there, and neither makes others
    wait nor waits.
    """
    micro_batches, _, stages = language.shape
    in_flight = stages + ahead
    orders = [list(_one_forward_one_backward(micro_batches, stages - 1 - stage)) for stage in range(stages)]
    free = [np.zeros(language.shape[1]) for _ in range(stages)]
    if tower is not None:
        orders.append(list(_one_forward_one_backward(micro_batches, in_flight, last_forward_first=False)))
        free.append(np.zeros(tower.shape[1]))
    ended: dict[tuple[int, bool, int], FloatArray] = {}
    waiting = [iter(order) for order in orders]
    current = [next(each, None) for each in waiting]
    while any(current):
        for worker, each in enumerate(current):
            task = each
            while task is not None:
                begin = _begin(worker, task, ended, tower, stages)
                if begin is None:
                    break
                backward, number = task
                share = 1 - FORWARD if backward else FORWARD
                if worker < stages:
                    free[worker] = np.maximum(free[worker], begin) + share * language[number, :, worker]
                else:
                    assert tower is not None
                    busy = tower[number] > 0
                    free[worker] = np.where(busy, np.maximum(free[worker], begin), free[worker]) + share * tower[number]
                ended[worker, backward, number] = free[worker]
                task = next(waiting[worker], None)
            current[worker] = task
    return max(float(each.max()) for each in free)


def _one_forward_one_backward(
    micro_batches: int, first: int, last_forward_first: bool = True
) -> Iterator[tuple[bool, int]]:
    """Yields a rank's passes in order, (whether backward, micro-batch); ``first`` forward passes before the first pair.

    A pair begins with its forward pass in a pipeline; a tower frees its memory first.
    """
    forward = min(first, micro_batches)
    yield from ((False, number) for number in range(forward))
    for number in range(micro_batches):
        pair = [(True, number)]
        if forward < micro_batches:
            pair.insert(0 if last_forward_first else 1, (False, forward))
            forward += 1
        yield from pair


def _begin(
    worker: int,
    task: tuple[bool, int],
    ended: dict[tuple[int, bool, int], FloatArray],
    tower: FloatArray | None,
    stages: int,
) -> FloatArray | float | None:
    """Returns when the passes have ended that a pass needs; None if not all of them are simulated yet."""
    backward, number = task
    if worker == stages:  # the tower
        done = ended.get((0, True, number)) if backward else np.zeros(1)
        return None if done is None else float(done.max())
    if not backward and worker == 0:
        if tower is None:
            return 0.0
        rows = ended.get((stages, False, number))
        return None if rows is None else float(np.max(rows, where=tower[number] > 0, initial=0.0))
    if backward and worker == stages - 1:
        return 0.0  # its own forward pass is before it
    return ended.get((worker + 1 if backward else worker - 1, backward, number))
