"""Plans of the epochs in use."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from vlmdata.format.dataset import VlmDataset
from vlmdata.packing.config import PlanConfig
from vlmdata.packing.plan.epoch import EpochPlan, plan_epoch
from vlmdata.packing.table import SampleTable

#: The current epoch and the next one, for prefetching.
_KEPT = 2


class EpochPlans:
    """Plans by epoch, computed on first use. Keeps the most recently used. Thread-safe: a thread feeds the workers.

    Args:
        table: The samples.
        config: The settings.
        datasets: The datasets by number, for messages.
        names: Their names.
    """

    def __init__(
        self, table: SampleTable, config: PlanConfig, datasets: Sequence[VlmDataset], names: Sequence[str]
    ) -> None:
        self._table, self._config = table, config
        self._datasets, self._names = datasets, names
        self._plans: OrderedDict[int, EpochPlan] = OrderedDict()
        self._lock = threading.Lock()

    def __getitem__(self, epoch: int) -> EpochPlan:
        with self._lock:
            plan = self._plans.get(epoch)
            if plan is None:
                plan = self._plans[epoch] = plan_epoch(self._table, self._config, epoch, key_of=self._key_of)
            self._plans.move_to_end(epoch)
            if len(self._plans) > _KEPT:
                self._plans.popitem(last=False)
            return plan

    def _key_of(self, sample: int) -> str:
        dataset = int(self._table.dataset[sample])
        first = int(self._table.dataset_offsets()[dataset])
        key = self._datasets[dataset].index.key(sample - first)
        return key if len(self._datasets) == 1 else f"{self._names[dataset]}:{key}"
