"""Fills the buffers of a rank's batches from a service."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial

from vlmdata.errors import ConfigMismatchError, DatasetFormatError, ResourceError, UsageError, VlmdataError
from vlmdata.loader.config import Reading
from vlmdata.loader.fill.buffers import BufferPool, LeasedBuffer
from vlmdata.loader.fill.filler import DAMAGE, Filled, FilledBuffer
from vlmdata.loader.request.pack_request import PackRequest, RankStream
from vlmdata.loader.state import Position
from vlmdata.packing.config import PlanConfig
from vlmdata.service.address import Server
from vlmdata.service.client.connection import (
    OF_ONE_SERVER,
    Call,
    CertificateError,
    ServerLostError,
    TokenRefusedError,
    in_thread,
    more_telling,
)
from vlmdata.service.client.servers import PAUSE_BETWEEN_ROUNDS, Servers
from vlmdata.service.protocol import MAX_QUERY_BYTES, MAX_STAGES, BatchQuery

#: Servers that are asked for one batch at the same time.
_MOST_ATTEMPTS = 2
#: Least seconds for an answer, when the time is almost over.
_LEAST_SECONDS = 0.2
#: Seconds to wait for servers that do not answer, when all others would mask a sample: their copies may be sound.
_SECONDS_FOR_A_SOUND_COPY = 30.0
#: Seconds between two looks whether the batch is still wanted.
_SECONDS_BETWEEN_LOOKS = 0.2
#: Seconds that a query's own error, which says more, has before the pipeline's.
_GRACE_SECONDS = 5.0


@dataclass(frozen=True, eq=False)
class _Attempt:
    server: Server
    call: Call
    lease: LeasedBuffer
    begun: float


class Race:
    """The servers that were asked for one batch, until one has answered; ``timeout`` is the seconds for all of it."""

    def __init__(
        self, servers: Servers, query: BatchQuery, size: int, pool: BufferPool, checked: bool, timeout: float
    ) -> None:
        self._servers, self._query, self._size, self._pool, self._checked = servers, query, size, pool, checked
        self._timeout, self._deadline = timeout, time.monotonic() + timeout
        self._patience = 0.0  # when to wait no longer for a sound copy
        self._running: dict[Future[Filled], _Attempt] = {}
        self._last_begun = 0.0
        self._failed: dict[Server, Exception] = {}  # in this round
        self._problems: dict[Server, Exception] = {}
        self._masked: tuple[LeasedBuffer, Filled] | None = None  # the best of the answers with masked samples
        self._masking: set[Server] = set()  # who gave them

    @property
    def is_late(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() >= self._deadline

    def fetch(self, stopped: threading.Event) -> tuple[LeasedBuffer, Filled]:
        """Returns the filled buffer and what the server says of it, unless nobody wants it any more (``stopped``).

        Raises:
            ResourceError: If no server answers in time; names all.
            VlmdataError: If all servers refuse: their copies of the data are damaged, or they have other data or
                versions.
        """
        self._servers.require_own_process()
        try:
            while not stopped.is_set():
                if (won := self._run(_SECONDS_BETWEEN_LOOKS) or self._best_masked()) is not None:
                    return won
                if self.is_late:
                    silent = [each.server for each in self._running.values()]
                    unanswered = {each: ServerLostError(f"server {each}: no answer") for each in silent}
                    raise self._servers.nobody({**unanswered, **self._problems}, self._timeout)
                if not self._running and not self._spare():
                    stopped.wait(PAUSE_BETWEEN_ROUNDS)
                    self._again()
            raise ResourceError("the loader is closed")
        finally:
            self._end()

    def _run(self, seconds: float) -> tuple[LeasedBuffer, Filled] | None:
        """Asks one more server if it is time for that, and waits for a sound answer."""
        spare, hedge = self._spare(), self._servers.hedge_seconds()
        late = time.monotonic() - self._last_begun >= hedge
        if spare and (not self._running or (late and len(self._running) < _MOST_ATTEMPTS)):
            self._begin(spare.pop(0))
        until_hedge = self._last_begun + hedge - time.monotonic()
        if not spare or len(self._running) >= _MOST_ATTEMPTS:
            until_hedge = seconds
        done, _ = wait(self._running, max(min(seconds, until_hedge), 0.0), FIRST_COMPLETED)
        for future in done:
            attempt = self._running.pop(future)
            try:
                filled = future.result()
            except OF_ONE_SERVER as error:
                attempt.lease.release()
                self._note_failure(attempt.server, error)
                continue
            except BaseException:
                attempt.lease.release()
                raise
            self._servers.succeeded(attempt.server, time.monotonic() - attempt.begun)
            for slow in self._running.values():
                if slow.begun < attempt.begun:  # the hedge was faster
                    self._servers.failed(slow.server, ServerLostError(f"server {slow.server}: slow"))
            if not filled.damaged:
                return attempt.lease, filled
            self._keep_masked(attempt, filled)
        return None

    def _best_masked(self) -> tuple[LeasedBuffer, Filled] | None:
        """Returns an answer with masked samples, if there is one, and no server is left that may have a sound copy.

        Servers that do not answer are waited for, since ranks that share a pack must get the same one.
        """
        if self._masked is None:
            return None
        others = bool(self._running or self._spare()) or not all(map(self._is_final, self._failed.items()))
        if others and time.monotonic() < self._patience:
            return None
        found, self._masked = self._masked, None
        return found

    def _again(self) -> None:
        """Lets all servers be asked again, except those that refused; a VlmdataError if that is all of them."""
        refusals = dict(filter(self._is_final, self._failed.items()))
        if refusals and len(refusals) == len(self._failed) and self._masked is None:
            raise self._refusal(refusals)
        for server in self._failed.keys() - refusals.keys():
            if isinstance(self._failed[server], TokenRefusedError | CertificateError):
                self._servers.forget(server)  # the next connection reads token and certificates again
        self._failed = refusals

    def _end(self) -> None:
        """Cancels the calls under way. Their buffers return when they have ended."""
        if self._masked is not None:
            self._masked[0].release()
        for future, attempt in self._running.items():
            attempt.call.cancel()
            future.add_done_callback(partial(_release, attempt.lease))

    def _note_failure(self, server: Server, error: Exception) -> None:
        self._failed[server] = error
        self._problems[server] = more_telling(self._problems.get(server), error)
        if isinstance(error, DAMAGE):
            self._servers.damaged(server, str(error))
        else:
            self._servers.failed(server, error)

    def _keep_masked(self, attempt: _Attempt, filled: Filled) -> None:
        """Keeps an answer with masked samples if it is the best one: fewest, then a choice that all ranks make."""
        self._masking.add(attempt.server)
        for message in filled.damaged.values():
            self._servers.damaged(attempt.server, message)
        worse = attempt.lease
        if self._masked is None or _rank(filled) < _rank(self._masked[1]):
            kept, self._masked = self._masked, (attempt.lease, filled)
            if kept is None:
                self._patience = min(time.monotonic() + _SECONDS_FOR_A_SOUND_COPY, self._deadline)
                return
            worse = kept[0]
        worse.release()

    def _is_final(self, failure: tuple[Server, Exception]) -> bool:
        """Returns whether asking this server again cannot help."""
        _, error = failure
        # The token was accepted before: it is being replaced, here or there.
        return isinstance(error, (ConfigMismatchError, UsageError, *DAMAGE)) and not isinstance(
            error, TokenRefusedError
        )

    def _refusal(self, refusals: Mapping[Server, Exception]) -> Exception:
        """Returns the error of servers that all refuse. If their copies are damaged, it names each."""
        damage = [error for error in refusals.values() if isinstance(error, DAMAGE)]
        if len(refusals) == 1 or not damage:
            return next(iter(refusals.values()))
        kinds = {type(error) for error in damage}
        kind: type[VlmdataError] = kinds.pop() if len(kinds) == 1 else DatasetFormatError
        listed = "\n".join(f"  {error}" for error in refusals.values())
        return kind(
            f"{self._servers.address.text}: no server has a sound copy of the data for this batch:\n{listed}\n"
            "Repair one copy, or replace it by a sound one, and start its server again; the loader's state is valid."
        )

    def _spare(self) -> list[Server]:
        asked = {attempt.server for attempt in self._running.values()}
        asked |= self._failed.keys() | self._masking
        return [each for each in self._servers.order(self._query.dp_rank) if each not in asked]

    def _begin(self, server: Server) -> None:
        try:
            connection = self._servers.connection(server)
        except UsageError as error:  # the token cannot be read: is it being replaced?
            self._failed[server] = self._problems[server] = TokenRefusedError(str(error))
            return
        lease, call, self._last_begun = self._pool.acquire(self._size), Call(), time.monotonic()
        remaining = max(self._deadline - self._last_begun, _LEAST_SECONDS)
        future = in_thread(
            lambda: connection.batch(self._query, lease.memory(), self._size, self._checked, remaining, call)
        )
        self._running[future] = _Attempt(server, call, lease, self._last_begun)


def _rank(filled: Filled) -> tuple[int, list[int]]:
    """Returns a key by which the answer with fewer masked samples comes first."""
    return len(filled.damaged), sorted(filled.damaged)


def _release(lease: LeasedBuffer, _: object) -> None:
    lease.release()


class ServedFiller:
    """Fetches the batches of one rank, ahead of time in as many threads as ``num_workers``."""

    def __init__(self, servers: Servers, stream: RankStream, reading: Reading):
        self.ahead, self.timeout = reading.num_workers * reading.prefetch_factor, reading.timeout + _GRACE_SECONDS
        self._servers, self._reading, self._plans = servers, reading, stream.plans
        self._query = partial(
            BatchQuery,
            datasets=tuple(each.manifest.fingerprint for each in stream.datasets),
            dp_rank=stream.dp_rank,
            dp_size=stream.dp_size,
            context_parallel=stream.context_parallel,
            parts=stream.parts,
            pixels=stream.pixels,
            on_damage=reading.on_damage,
        )
        _require_short(self._query(plan=stream.plans.config, position=Position()), stream.plans.config)
        self._threads = ThreadPoolExecutor(max(reading.num_workers, 1), thread_name_prefix="vlmdata-fetch")
        self._stopped = threading.Event()

    def start(self, request: PackRequest, pool: BufferPool) -> Future[FilledBuffer]:
        """Starts to fetch a batch; without ``num_workers``, the future is done."""
        if self.ahead:
            return self._threads.submit(self._fetch, request, pool)
        done = Future[FilledBuffer]()
        done.set_result(self._fetch(request, pool))
        return done

    def stop(self, wait: bool) -> None:
        """Cancels what is under way, without waiting: gRPC may wait for a dead server."""
        self._stopped.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, request: PackRequest, pool: BufferPool) -> FilledBuffer:
        # A schedule changes the settings in mid-run: those of now also make the plans before.
        query, reading = self._query(plan=self._plans.config, position=request.position), self._reading
        checked = reading.checks != "off"
        race = Race(self._servers, query, request.arrays.bytes, pool, checked, reading.timeout)
        return race.fetch(self._stopped)


def _require_short(query: BatchQuery, config: PlanConfig) -> None:
    """Raises a UsageError if servers would refuse the queries of a run after its last change: it says so at its start.

    Raises:
        UsageError: If the run has too many changes.
    """
    changes = len(config.schedule) + len(config.earlier)
    settled = replace(query, plan=replace(config, schedule=(), earlier=()))
    # A query names the settings before each change. Of scheduled ones, these are about as long as those of now.
    longest = len(query.encode()) + len(config.schedule) * len(settled.encode())
    if changes > MAX_STAGES or longest > MAX_QUERY_BYTES:
        raise UsageError(
            f"the mixture changes {changes} times, which makes queries of up to {longest} bytes; a collation service "
            f"takes {MAX_STAGES} changes and {MAX_QUERY_BYTES} bytes. Load the data without a service, or start a new "
            "run"
        )


@dataclass(frozen=True, eq=False)
class CollationService:
    """A service whose datasets are opened."""

    servers: Servers
    versions: Mapping[str, str]  # fingerprints of versions, by name: ``grpc://host/cord@1``

    def pinned(self, name: str, fingerprint: str) -> str | None:
        """Returns the name of the version with this fingerprint of a dataset of which no version is named, or None."""
        found = (each for each, known in self.versions.items() if known == fingerprint)
        return next((each for each in found if each.rpartition("@")[0] == name), None)

    def filler(self, stream: RankStream, reading: Reading) -> ServedFiller:
        """Returns what fills the buffers of a rank's batches."""
        return ServedFiller(self.servers, stream, reading)

    def close(self) -> None:
        """Closes the connections."""
        self.servers.close()
