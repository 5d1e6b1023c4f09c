"""Says that steps wait for their data, and what to change."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from model.training.step import StepResult
from vlmdata.format.dataset import VlmDataset
from vlmdata.media.codecs import RAW, REGISTRY, codec_feature

#: Steps that are looked at together, after the first one, in which the workers start.
_STEPS = 20
#: Share of the time of these steps that may pass in waiting.
_TOLERATED = 0.05


def decoded_codecs(datasets: Sequence[VlmDataset]) -> list[str]:
    """Names of the codecs, but for raw, that images of the datasets are stored by."""
    features = {feature for dataset in datasets for feature in dataset.manifest.features}
    return [name for name in REGISTRY if name != RAW and codec_feature(name) in features]


class DataWait:
    """Watches how long steps wait for batches.

    Args:
        workers: Loader processes per rank (``data.workers``).
        decoded: Codecs of the datasets whose pixels the loader decodes.
    """

    def __init__(self, workers: int, decoded: Sequence[str]):
        self._workers, self._decoded = workers, decoded
        self._recent: deque[tuple[float, float]] = deque(maxlen=_STEPS)
        self._steps = 0
        self._said = False

    def note(self, result: StepResult) -> str | None:
        """What to say after a step: a line, once in a run, if the last steps waited for more than a twentieth."""
        self._steps += 1
        if self._steps > 1:
            self._recent.append((result.data_wait, result.seconds))
        waited, seconds = (sum(column) for column in zip(*self._recent, strict=True)) if self._recent else (0.0, 0.0)
        if self._said or len(self._recent) < _STEPS or waited <= _TOLERATED * seconds:
            return None
        self._said = True
        codecs = f", which decode pixels stored as {' and '.join(self._decoded)}" if self._decoded else ""
        return (
            f"the last {_STEPS} steps waited for data {waited / seconds:.0%} of their time: raise --workers "
            f"(num_workers of the loader), now {self._workers} per rank{codecs}"
        )
