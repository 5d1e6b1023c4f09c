"""The batches and the mixture that a loader gives from an epoch on, for the terminal, the page and its server."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmdata.inspect.page.payload import safe
from vlmdata.inspect.serialise import to_jsonable
from vlmdata.inspect.text import one_line

if TYPE_CHECKING:
    from vlmdata.format.dataset import VlmDataset
    from vlmdata.inspect.batch import BatchDescription
    from vlmdata.loader.loader import StreamingLoader

#: The page shows the mixture in about this many parts, however many steps there are.
_PARTS = 64


@dataclass(frozen=True, eq=False)
class EpochPacks:
    """Describes batches; one at a time, from any thread. The loader is None if there is no sample to load.

    ``steps`` is the number of steps of the mixture; None is those of the epoch.
    """

    loader: StreamingLoader | None
    epoch: int
    steps: int | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def describe(self, number: int) -> BatchDescription:
        """Describes the batch of this number, from 0.

        Raises:
            NotFoundError: If the epoch has no such batch for this rank.
        """
        from vlmdata.inspect.batch import batch_at, describe_batch  # imports torch

        loader = self.loader
        assert loader is not None
        with self._lock:
            return describe_batch(
                batch_at(loader, number, self.epoch),
                cost=loader.plan_config.cost,
                context_parallel=loader.config.parallelism.context_parallel,
                capacity=loader.plan_config.capacity,
                number=number,
            )

    def page(self, start: int, count: int) -> dict[str, Any]:
        """Describes some batches for the page, with their total number and the options that determine them."""
        if self.loader is None:
            return {"batches": [], "total": 0, "options": {}}
        from vlmdata.inspect.batch import num_batches

        with self._lock:
            total = num_batches(self.loader, self.epoch)
        found = [self.describe(number) for number in range(start, min(start + count, total))]
        return {"batches": safe(to_jsonable(found)), "total": total, "options": _options(self.loader, self.epoch)}

    def mixture(self) -> dict[str, Any]:
        """Returns names of the datasets and their shares over the steps, which ``vlmdata plan --steps`` prints too."""
        if self.loader is None:
            return {"datasets": [], "parts": []}
        from vlmdata.packing.plan.shares import shares_over_steps

        with self._lock:
            plans = self.loader.plans
            steps = plans[self.epoch].num_steps if self.steps is None else self.steps
            parts = shares_over_steps(plans, self.epoch, steps, _PARTS)
        return {"datasets": _names(self.loader.datasets), "parts": to_jsonable(parts)}


def _names(datasets: Sequence[VlmDataset]) -> list[str]:
    """Returns the last part of each name, or whole names if these are not unique."""
    short = [one_line(Path(dataset.name).name or dataset.name) for dataset in datasets]
    return short if len(set(short)) == len(short) else [one_line(dataset.name) for dataset in datasets]


def _options(loader: StreamingLoader, epoch: int) -> dict[str, Any]:
    plan = loader.plan_config
    return {
        "capacity": plan.capacity,
        "alignment": plan.alignment,
        "context_parallel": loader.config.parallelism.context_parallel,
        "global_batch": plan.global_batch,
        "data_parallel": f"rank {loader.dp_rank} of {loader.dp_size}",
        "seed": plan.seed,
        "epoch": epoch,
    }
