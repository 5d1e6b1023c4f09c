"""Says that steps wait for their data or for device memory, and what to change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

from vlmdata.format.dataset import VlmDataset
from vlmdata.media.codecs import RAW, codecs_of
from vlmdata.model.training.step import StepResult

#: Steps that are looked at together.
_STEPS = 20
#: Share of their time that may pass in waiting for data.
_TOLERATED = 0.05


def decoded_codecs(datasets: Sequence[VlmDataset]) -> list[str]:
    """Names of the codecs, but for raw, that images of the datasets are stored by."""
    features = {feature for dataset in datasets for feature in dataset.manifest.features}
    return [name for name in codecs_of(features) if name != RAW]


class StepNote(ABC):
    """Looks at the last steps of a run, without the first ones, and says something about them once."""

    first = 1  # steps that are not looked at: in the first one, the workers start

    def __init__(self) -> None:
        self._recent: deque[StepResult] = deque(maxlen=_STEPS)
        self._steps = 0
        self._said = False

    def note(self, result: StepResult) -> str | None:
        """Returns a line to print after a step, if there is anything to say."""
        self._steps += 1
        if self._steps > self.first:
            self._recent.append(result)
        line = None if self._said or len(self._recent) < _STEPS else self.line(self._recent)
        self._said = self._said or line is not None
        return line

    @abstractmethod
    def line(self, steps: Sequence[StepResult]) -> str | None:
        """Returns what to say about the last steps."""


class DataWait(StepNote):
    """Watches how long steps wait for batches of some loader ``workers``, which decode the pixels of some codecs."""

    def __init__(self, workers: int, decoded: Sequence[str]):
        super().__init__()
        self._workers, self._decoded = workers, decoded

    def line(self, steps: Sequence[StepResult]) -> str | None:
        """Speaks if the steps waited for more than a twentieth of their time."""
        waited, seconds = sum(each.data_wait for each in steps), sum(each.seconds for each in steps)
        if waited <= _TOLERATED * seconds:
            return None
        codecs = f", which decode pixels stored as {' and '.join(self._decoded)}" if self._decoded else ""
        return (
            f"the last {_STEPS} steps waited for data {waited / seconds:.0%} of their time: raise --workers "
            f"(num_workers of the loader), now {self._workers} per rank{codecs}"
        )


class MemoryNote(StepNote):
    """Counts steps in which PyTorch's allocator finds no memory, frees what is cached and allocates again.

    The device is idle during that time. Such steps took 1.4 times as long on an H200 (docs/decisions/0065).
    """

    first = 10  # PyTorch takes its memory in them

    def line(self, steps: Sequence[StepResult]) -> str | None:
        """Speaks if half of the steps had retries."""
        slow = sum(each.memory_retries > 0 for each in steps)
        if 2 * slow < _STEPS:
            return None
        return (
            f"{slow} of the last {_STEPS} steps found no free device memory and had to free and allocate again, which "
            f"takes time (tensors need up to {steps[-1].memory / 2**30:.1f} GiB on a GPU): lower --capacity, or "
            "recompute more: --set model.recompute=selective, --set model.vision_recompute=true"
        )
