"""Batches that are made ahead of the consumer, in order."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Protocol

from vlmdata.errors import ResourceError
from vlmdata.loader.fill.buffers import BufferPool, LeasedBuffer
from vlmdata.loader.fill.filler import Filled, FilledBuffer
from vlmdata.loader.request.pack_request import PackRequest

#: Seconds for the thread to end when the pipeline is closed.
_GRACE_SECONDS = 5.0


class Filler(Protocol):
    """Fills the buffers of requests: from shards, or from a service."""

    ahead: int  # number of requests under way; 0 if each is filled when its batch is asked for
    timeout: float  # seconds to wait for a batch before that is an error

    def start(self, request: PackRequest, pool: BufferPool) -> Future[FilledBuffer]:
        """Starts to fill a buffer of the pool."""

    def stop(self, wait: bool) -> None:
        """Stops everything that was started, and waits until it has ended if ``wait``."""


class Pipeline[Item]:
    """A thread that has several requests under way, finishes them in order, and stays one ahead of the consumer.

    Errors of a request reach the consumer after the batches before it. ``finish`` makes an item of a filled buffer and
    takes the buffer over; it may start a copy to a device.
    """

    def __init__(
        self,
        requests: Iterator[PackRequest],
        filler: Filler,
        pool: BufferPool,
        finish: Callable[[PackRequest, LeasedBuffer, Filled], Item],
    ):
        self._requests, self._filler, self._pool, self._finish = requests, filler, pool, finish
        self._timeout = filler.timeout
        self._ready: queue.Queue[Any] = queue.Queue(maxsize=1)  # one ahead of the consumer
        self._under_way: deque[tuple[PackRequest, Future[FilledBuffer]]] = deque()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vlmdata-pipeline", daemon=True)
        self._thread.start()

    def close(self, wait: bool = True) -> None:
        """Stops everything, and waits until what fills buffers and the thread are gone if ``wait``."""
        self._stopped.set()
        wait = wait and self._thread is not threading.current_thread()  # garbage collection may run in any thread
        self._filler.stop(wait)
        if wait:
            self._thread.join(_GRACE_SECONDS)

    def __iter__(self) -> Iterator[Item]:
        while True:
            try:
                item = self._ready.get(timeout=self._timeout)
            except queue.Empty:
                self.close(wait=False)
                raise ResourceError(
                    f"no batch came for {self._timeout:.0f} s: a worker is stuck, or storage is slow. Check "
                    "the workers and the disk, or raise `timeout`. If workers never start, a library's threads did "
                    'not survive the fork: set `multiprocessing_context="forkserver"`. The loader\'s state is valid.'
                ) from None
            if item is None:
                return
            if isinstance(item, BaseException):
                try:
                    raise item
                finally:
                    del item  # otherwise it and its traceback form a cycle that keeps all batches alive
            yield item

    def _run(self) -> None:
        try:
            self._put(self._make())
        except BaseException as error:
            self._put(error)
        finally:
            self._stopped.set()
            for _, future in self._under_way:
                if not future.cancel():
                    future.add_done_callback(_release)
            self._under_way.clear()

    def _make(self) -> Exception | None:
        """Passes items on until the requests end. Returns why they do, if that is an error."""
        failure = self._start_more()
        while self._under_way and not self._stopped.is_set():
            request, future = self._under_way.popleft()
            try:
                lease, filled = future.result()
            finally:
                del future  # an error's traceback refers to it, and it to the error
            failure = failure or self._start_more()
            if self._stopped.is_set():
                lease.release()
            else:
                self._put(self._finish(request, lease, filled))
        return failure

    def _start_more(self) -> Exception | None:
        """Starts requests until enough are under way. Returns why there are no more, if that is an error."""
        while len(self._under_way) < self._filler.ahead and not self._stopped.is_set():
            try:
                request = next(self._requests)
                self._under_way.append((request, self._filler.start(request, self._pool)))
            except StopIteration:
                return None
            except Exception as error:
                return error  # belongs after the batches under way
        return None

    def _put(self, item: Any) -> None:
        """Passes an item, an exception or None (the end) to the consumer. Waits until it has taken the one before."""
        while not self._stopped.is_set():
            try:
                self._ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return


def _release(future: Future[FilledBuffer]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result()[0].release()
