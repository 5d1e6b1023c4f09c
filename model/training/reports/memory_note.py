"""Tells the user if steps wait for device memory, and what to change."""

from __future__ import annotations

from collections import deque

from model.training.step import StepResult

#: Number of last steps to look at, and of first steps to ignore, because PyTorch takes its memory in them.
_STEPS, _FIRST = 20, 10


class MemoryNote:
    """Counts steps in which PyTorch's allocator finds no memory, frees what is cached and allocates again.

    The device is idle during that time. Such steps took 1.4 times as long on an H200 (docs/decisions/0065).
    """

    def __init__(self) -> None:
        self._retries: deque[int] = deque(maxlen=_STEPS)
        self._steps = 0
        self._said = False

    def note(self, result: StepResult) -> str | None:
        """Returns a line to print after a step, once in a run, if half of the last steps had retries."""
        self._steps += 1
        if self._steps > _FIRST:
            self._retries.append(result.memory_retries)
        slow = sum(retries > 0 for retries in self._retries)
        if self._said or len(self._retries) < _STEPS or 2 * slow < _STEPS:
            return None
        self._said = True
        return (
            f"{slow} of the last {_STEPS} steps found no free device memory and had to free and allocate again, which "
            f"takes time (tensors need up to {result.memory / 2**30:.1f} GiB on a GPU): lower --capacity, or recompute "
            "more: --set model.recompute=selective, --set model.vision_recompute=true"
        )
