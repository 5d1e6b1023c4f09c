"""Makes batches before they are asked for: the plan says which one a rank needs next."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from vlmdata.errors import VlmdataError
from vlmdata.loader.request.pack_request import PackRequest
from vlmdata.loader.state import Position
from vlmdata.service.protocol import BatchQuery
from vlmdata.service.server.packs import BusyError, Packs
from vlmdata.service.server.plans import PlanBook

_log = logging.getLogger("vlmdata.service")

#: Queries that are remembered, to know a rank that goes through the epoch.
_REMEMBERED = 8192


class ReadAhead:
    """Makes the next ``depth`` batches of ranks that ask for one batch after another. Thread-safe.

    A rank's first query makes nothing ahead, and neither do queries of a rank that goes to another server after each.
    Nothing goes beyond the end of an epoch, since the next plan may never be needed.
    """

    def __init__(self, plans: PlanBook, packs: Packs, depth: int, threads: int):
        self._plans, self._packs, self._depth, self._most = plans, packs, depth, threads
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="vlmdata-ahead")
        self._lock = threading.Lock()
        self._asked: OrderedDict[int, None] = OrderedDict()
        self._expected: OrderedDict[int, None] = OrderedDict()  # those that follow an answered one
        self._begun: OrderedDict[int, Position] = OrderedDict()  # asked or made ahead, and what follows them
        self._under_way = 0

    def asked(self, query: BatchQuery) -> None:
        """Notes a query that arrives: nothing needs to be made ahead for it any more."""
        if self._depth:
            with self._lock:
                _remember(self._asked, _identity(query), None)

    def note(self, query: BatchQuery, request: PackRequest) -> None:
        """Notes a query that is answered, and begins with what follows."""
        if not self._depth or request.following.epoch != request.position.epoch:
            return
        following = query.at(request.following)
        here, there = _identity(query), _identity(following)
        with self._lock:
            goes_on = here in self._expected
            self._expected.pop(here, None)
            _remember(self._expected, there, None)
            _remember(self._begun, here, request.following)
        if goes_on:
            self._begin(following, self._depth)

    def close(self) -> None:
        """Begins nothing any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self, query: BatchQuery, depth: int) -> None:
        with self._lock:
            if self._under_way >= self._most:
                return
            self._under_way += 1
        try:
            self._threads.submit(self._make, query, depth)
        except RuntimeError:  # closed
            self._end()

    def _make(self, query: BatchQuery, depth: int) -> None:
        try:
            here = _identity(query)
            with self._lock:
                following, asked = self._begun.get(here), here in self._asked
            if asked and following is None:
                return  # goes on from there when it is answered
            request = None
            if following is None:
                request, plan = self._plans.prepare(query)
                following = request.following
                with self._lock:
                    _remember(self._begun, here, following)
            if depth > 1 and following.epoch == query.position.epoch:
                self._begin(query.at(following), depth - 1)
            if request is not None:
                self._packs.prepare(request, plan, query.on_damage)
        except (VlmdataError, BusyError):
            pass  # the rank will get it when it asks
        except Exception:
            _log.exception("making a batch ahead failed")
        finally:
            self._end()

    def _end(self) -> None:
        with self._lock:
            self._under_way -= 1


def _identity(query: BatchQuery) -> int:
    """Returns a number for a query, wherever the client runs. A query itself may be large, and comes from outside."""
    return hash(query.to(""))


def _remember[Value](queries: OrderedDict[int, Value], query: int, value: Value) -> None:
    queries[query] = value
    if len(queries) > _REMEMBERED:
        queries.popitem(last=False)
