"""The batches that a loader gives one rank in an epoch, for the terminal, the page and its server."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vlmdata.inspect.page.payload import safe
from vlmdata.inspect.serialise import to_jsonable

if TYPE_CHECKING:
    from vlmdata.inspect.batch import BatchDescription
    from vlmdata.loader.loader import StreamingLoader


@dataclass(frozen=True, eq=False)
class EpochPacks:
    """Describes batches; one at a time, from any thread. The loader is None if there is no sample to load."""

    loader: StreamingLoader | None
    epoch: int
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
