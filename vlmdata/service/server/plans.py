"""Plans of a server: those of the epochs in use, within a limit of memory."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import numpy as np

from vlmdata.errors import NotFoundError, UsageError, VlmdataError
from vlmdata.format.dataset import VlmDataset
from vlmdata.loader.data import require_one_tokenizer
from vlmdata.loader.request.index_rows import indexed_pack, sample_table
from vlmdata.loader.request.pack_request import EpochPlans, PackRequest, next_of
from vlmdata.packing.config import PlanConfig
from vlmdata.packing.plan.blend import uses_per_epoch
from vlmdata.packing.plan.epoch import EpochPlan
from vlmdata.packing.plan.history import datasets_of
from vlmdata.packing.table import SampleTable
from vlmdata.service.protocol import BatchQuery
from vlmdata.service.server.datasets import Datasets
from vlmdata.service.server.packs import BusyError

#: Plans kept, if they are small. Most runs use one or two at a time.
_KEPT = 64
#: Plans computed at the same time.
_AT_ONCE = 2
#: Steps of a plan whose assignment to ranks is kept. All ranks ask for about the same step.
_STEPS_KEPT = 8
#: Requests kept that were made ahead, of some kilobytes each; none of more samples or images, whose arrays add up.
_REQUESTS_KEPT = 64
_MOST_SAMPLES_KEPT, _MOST_IMAGES_KEPT = 1024, 4096
#: Bytes that planning takes at its peak, for each use of a sample in the epoch (docs/scaling.md).
_PEAK_BYTES = 80
#: The same for each token of a pack beyond the first, as far as samples can fill it: tables by size.
_PEAK_BYTES_OF_ROOM, _SMALL_ROOM = 16, 1 << 16
#: Limits of what a query may ask for. A plan's size grows with them.
_MAX_GLOBAL_BATCH = 1 << 14
_MAX_CAPACITY = 1 << 31
_MAX_PASSES = 16


@dataclass(frozen=True)
class PlanKey:
    """Identifies a plan by the fingerprints of its datasets, in order, and of its settings, and by its epoch."""

    datasets: tuple[str, ...]
    config: str
    epoch: int


class KeptPlan:
    """A plan, and which rank runs which pack in its latest steps. Thread-safe."""

    def __init__(self, plan: EpochPlan):
        self.plan = plan
        self._lock = threading.Lock()  # a step is assigned once, whichever rank asks
        self._assignment = lru_cache(_STEPS_KEPT)(plan.assignment)

    @property
    def bytes(self) -> int:
        """Bytes of the plan and of its table, also if another plan has the same table."""
        return _bytes(self.plan) + _bytes(self.plan.table)

    def packs(self, step: int, dp_rank: int, dp_size: int) -> list[int]:
        """Returns the packs of a rank in a step, one per micro-batch.

        Raises:
            NotFoundError: If the epoch has no such step.
            UsageError: If ``global_batch`` is not a multiple of ``dp_size``.
        """
        if step >= self.plan.num_steps:
            raise NotFoundError(f"step {step} of epoch {self.plan.epoch}: it has {self.plan.num_steps} steps")
        with self._lock:
            packs: list[int] = self._assignment(step, dp_size)[:, dp_rank].tolist()
        return packs


class PlanBook:
    """Finds the request for a query. Each plan is computed once for all queries that wait for it. Thread-safe.

    ``memory`` is the bytes of all plans, those being computed included.
    """

    def __init__(self, datasets: Datasets, memory: int, timeout: float):
        self._datasets = datasets
        self._memory, self._timeout = memory, timeout
        self._planning = threading.Semaphore(_AT_ONCE)
        self._changed = threading.Condition()
        self._plans: OrderedDict[PlanKey, Future[KeptPlan]] = OrderedDict()
        self._requests: OrderedDict[BatchQuery, tuple[PackRequest, str]] = OrderedDict()
        self._reserved = 0  # bytes, for plans being computed

    @property
    def bytes_in_use(self) -> int:
        """Bytes of all plans, those being computed included."""
        with self._changed:
            return self._in_use()

    def request(self, query: BatchQuery) -> tuple[PackRequest, str]:
        """Returns the request for a query, and the fingerprint of data and plan.

        Raises:
            ConfigMismatchError: If this server has other datasets.
            UsageError: If the query asks for something impossible, or too large.
            BusyError: If the plan is not ready in time.
        """
        query = query.to("")
        with self._changed:
            if (known := self._requests.pop(query, None)) is not None:
                return known  # made ahead; asked for once
        return self._request(query)

    def prepare(self, query: BatchQuery) -> tuple[PackRequest, str]:
        """Returns the same as :meth:`request`, and keeps it for that."""
        query = query.to("")
        found = self._request(query)
        request = found[0]
        if len(request.pack.samples.keys) > _MOST_SAMPLES_KEPT or len(request.pack.images.grids) > _MOST_IMAGES_KEPT:
            return found
        with self._changed:
            self._requests[query] = found
            if len(self._requests) > _REQUESTS_KEPT:
                self._requests.popitem(last=False)
        return found

    def _request(self, query: BatchQuery) -> tuple[PackRequest, str]:
        datasets = self._chosen(query)
        key = PlanKey(query.datasets, query.plan.fingerprint(), query.position.epoch)
        try:
            kept = self._plan(key, datasets, query.plan)
            packs = kept.packs(query.position.step, query.dp_rank, query.dp_size)
            if query.position.micro_batch >= len(packs):
                raise NotFoundError(f"{query.position}: the step has {len(packs)} micro-batches per rank")
            pack = indexed_pack(kept.plan, packs[query.position.micro_batch], datasets)
            # Workers know the datasets by their numbers at this server, the plan by those of the query.
            opened = list(self._datasets.opened)
            here = np.array([opened.index(each) for each in query.datasets])
            pack = replace(pack, samples=replace(pack.samples, dataset=here[pack.samples.dataset]))
            following = next_of(query.position, kept.plan, packs)
            request = PackRequest.of(pack, query.position, following, query.parts, query.pixels, query.context_parallel)
        except VlmdataError:
            raise
        except (ValueError, OverflowError) as error:
            raise UsageError(f"this cannot be planned: {error}") from error
        return request, f"{'+'.join(key.datasets)}:{key.config}"

    def _chosen(self, query: BatchQuery) -> tuple[VlmDataset, ...]:
        return tuple(map(self._datasets.require, query.datasets))

    def _plan(self, key: PlanKey, datasets: Sequence[VlmDataset], config: PlanConfig) -> KeptPlan:
        """Returns a plan, computed now or by another query."""
        with self._changed:
            known = self._plans.get(key)
            future = known or self._plans.setdefault(key, Future[KeptPlan]())
            self._plans.move_to_end(key)
        if known is not None:
            try:
                return known.result(self._timeout)
            except TimeoutError:
                raise BusyError(f"the plan of epoch {key.epoch} was not ready in {self._timeout:.0f} s") from None
        try:
            self._compute(key, datasets, config, future)
        except BaseException as error:
            with self._changed:
                del self._plans[key]
            future.set_exception(error)
            raise
        return future.result()

    def _compute(
        self, key: PlanKey, datasets: Sequence[VlmDataset], config: PlanConfig, future: Future[KeptPlan]
    ) -> None:
        deadline = time.monotonic() + self._timeout
        if not self._planning.acquire(timeout=self._timeout):
            raise BusyError(f"other plans were not ready in {self._timeout:.0f} s")
        try:
            table = self._table(key, datasets)
            uses = _uses(table, config)
            size = _bytes(table) + uses * _PEAK_BYTES + _room(table, config, uses) * _PEAK_BYTES_OF_ROOM
            self._reserve(size, deadline)
            try:
                names = [self._datasets.names[each] for each in key.datasets]
                future.set_result(KeptPlan(EpochPlans(table, config, datasets, names)[key.epoch]))
            finally:
                with self._changed:
                    self._reserved -= size
                    self._changed.notify_all()
        finally:
            self._planning.release()

    def _table(self, key: PlanKey, datasets: Sequence[VlmDataset]) -> SampleTable:
        with self._changed:
            for other, future in self._plans.items():
                if other.datasets == key.datasets and future.done():
                    return future.result().plan.table
        require_one_tokenizer(datasets)
        return sample_table(datasets)

    def _reserve(self, size: int, deadline: float) -> None:
        """Makes room for a plan: forgets those that were used least recently, and waits for those being computed."""
        if size > self._memory:
            raise UsageError(
                f"planning this epoch takes {size} bytes, more than the {self._memory} bytes of the server's --memory "
                "that are for plans; give the server more memory"
            )
        with self._changed:
            while self._in_use() + size > self._memory or self._kept() >= _KEPT:
                if not self._forget() and not self._changed.wait(max(deadline - time.monotonic(), 0.0)):
                    raise BusyError(f"other plans use {self._in_use()} of {self._memory} bytes")
            self._reserved += size

    def _forget(self) -> bool:
        """Forgets the plan that was used least recently; returns False if all are being computed."""
        oldest = next((key for key, future in self._plans.items() if future.done()), None)
        if oldest is not None:
            del self._plans[oldest]
        return oldest is not None

    def _kept(self) -> int:
        return sum(each.done() for each in self._plans.values())

    def _in_use(self) -> int:
        return self._reserved + sum(each.result().bytes for each in self._plans.values() if each.done())


def _bytes(holder: EpochPlan | SampleTable) -> int:
    """Returns the bytes of the arrays of a plan or a table."""
    arrays = [getattr(holder, field.name) for field in fields(holder)]
    return sum(each.nbytes for each in arrays if isinstance(each, np.ndarray))


def _room(table: SampleTable, config: PlanConfig, uses: int) -> int:
    """Returns the most tokens that a pack can have, now and before, beyond those of usual packs."""
    longest = int(table.lengths.max(initial=0)) + config.alignment
    rooms = (min(each.capacity, uses * longest) for each in (config, *(stage.config for stage in config.earlier)))
    return max(0, max(rooms) - _SMALL_ROOM)


def _uses(table: SampleTable, config: PlanConfig) -> int:
    """Returns the most samples that an epoch uses, now and before; a UsageError if that is beyond the limits."""
    if config.earlier:
        stages = [(datasets_of(table, each.datasets)[0], each.config) for each in config.earlier]
        return max(_uses(part, settings) for part, settings in [*stages, (table, replace(config, earlier=()))])
    if config.global_batch > _MAX_GLOBAL_BATCH:
        raise UsageError(f"global_batch is {config.global_batch}; servers allow {_MAX_GLOBAL_BATCH}")
    if config.capacity > _MAX_CAPACITY:
        raise UsageError(f"capacity is {config.capacity}; servers allow {_MAX_CAPACITY}")
    uses = sum(uses_per_epoch(table, config.blend))
    if uses > _MAX_PASSES * len(table):
        raise UsageError(
            f"an epoch of this blend uses {float(uses):.3g} samples, over {_MAX_PASSES} times the {len(table)} there "
            "are; use smaller weights and more epochs"
        )
    return int(uses) + 1
