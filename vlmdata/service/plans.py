"""Plans of a server: a few configurations, each with its current epochs."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np

from vlmdata.errors import ConfigMismatchError, UsageError
from vlmdata.format.dataset import VlmDataset
from vlmdata.loader.open import require_one_tokenizer, sample_table
from vlmdata.loader.plans import EpochPlans
from vlmdata.loader.request import PackRequest
from vlmdata.loader.served.protocol import BatchQuery
from vlmdata.loader.stream import RankStream
from vlmdata.packing.blend import passes_per_epoch
from vlmdata.packing.config import PlanConfig
from vlmdata.packing.table import SampleTable

#: Configurations kept. Each holds the plans of two epochs: about 8 bytes a sample and epoch.
_KEPT = 4
#: Plans computed at the same time.
_AT_ONCE = 2
#: Limits of what a query may ask for. A plan's size grows with them.
_MAX_GLOBAL_BATCH = 1 << 14
_MAX_CAPACITY = 1 << 31
_MAX_PASSES = 16


class PlanBook:
    """Finds the request for a query. Thread-safe.

    Args:
        datasets: The datasets of the server, by fingerprint, in its order.
        names: Their names, by fingerprint.
    """

    def __init__(self, datasets: dict[str, VlmDataset], names: dict[str, str]):
        self._datasets, self._names = datasets, names
        self._numbers = {fingerprint: number for number, fingerprint in enumerate(datasets)}
        self._lock = threading.Lock()
        self._planning = threading.Semaphore(_AT_ONCE)
        self._known: OrderedDict[tuple[tuple[str, ...], str], EpochPlans] = OrderedDict()

    def request(self, query: BatchQuery) -> tuple[PackRequest, str]:
        """Returns the request for a query, and the fingerprint of data and plan.

        Raises:
            ConfigMismatchError: If this server has other datasets.
            UsageError: If the query asks for something impossible, or too large.
        """
        datasets = self._chosen(query)
        fingerprint = query.plan.fingerprint()
        plans = self._plans(query.datasets, datasets, query.plan, fingerprint)
        stream = RankStream(
            plans,
            datasets,
            query.plan,
            query.dp_rank,
            query.dp_size,
            query.context_parallel,
            query.parts,
            query.pixels,
        )
        try:
            with nullcontext() if plans.has(query.position.epoch) else self._planning:
                request = stream.request(query.position)
        except (UsageError, ConfigMismatchError):
            raise
        except (ValueError, OverflowError) as error:
            raise UsageError(f"this cannot be planned: {error}") from error
        # Workers know the datasets by their numbers at this server, the plan by those of the query.
        here = np.array([self._numbers[each] for each in query.datasets])
        samples = replace(request.samples, dataset=here[request.samples.dataset])
        return replace(request, samples=samples), f"{'+'.join(query.datasets)}:{fingerprint}"

    def _chosen(self, query: BatchQuery) -> tuple[VlmDataset, ...]:
        if missing := [each for each in query.datasets if each not in self._datasets]:
            here = ", ".join(f"{name} {fingerprint[:16]}" for fingerprint, name in self._names.items())
            raise ConfigMismatchError(
                f"the client wants the dataset with fingerprint {missing[0][:16]}, the server has {here}. Serve that "
                "dataset, or open the loader again."
            )
        return tuple(self._datasets[each] for each in query.datasets)

    def _plans(
        self, key: tuple[str, ...], datasets: Sequence[VlmDataset], config: PlanConfig, fingerprint: str
    ) -> EpochPlans:
        with self._lock:
            plans = self._known.get((key, fingerprint))
            if plans is None:
                require_one_tokenizer(datasets)
                table = sample_table(datasets)
                _require_bounded(table, config)
                names = [self._names[each] for each in key]
                plans = self._known[key, fingerprint] = EpochPlans(table, config, datasets, names)
            self._known.move_to_end((key, fingerprint))
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
            return plans


def _require_bounded(table: SampleTable, config: PlanConfig) -> None:
    if config.global_batch > _MAX_GLOBAL_BATCH:
        raise UsageError(f"global_batch is {config.global_batch}; servers allow {_MAX_GLOBAL_BATCH}")
    if config.capacity > _MAX_CAPACITY:
        raise UsageError(f"capacity is {config.capacity}; servers allow {_MAX_CAPACITY}")
    sizes = [int(b - a) for a, b in zip(table.dataset_offsets()[:-1], table.dataset_offsets()[1:], strict=True)]
    uses = sum(size * passes for size, passes in zip(sizes, passes_per_epoch(table, config.blend), strict=True))
    if uses > _MAX_PASSES * sum(sizes):
        raise UsageError(
            f"an epoch of this blend uses {float(uses):.3g} samples, over {_MAX_PASSES} times the {sum(sizes)} there "
            "are; use smaller weights and more epochs"
        )
