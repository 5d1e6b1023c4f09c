"""Batches that are made ahead of the consumer, in order."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from vlmdata.errors import ResourceError
from vlmdata.loader.fill.buffers import Lease
from vlmdata.loader.fill.fill import Filled
from vlmdata.loader.request.request import PackRequest

#: Converts a filled buffer, given its request and the number of bytes read. Takes ownership of the buffer.
type Finish[Item] = Callable[[PackRequest, Lease, Filled], Item]
#: Starts to fill a buffer for a request.
type Start = Callable[[PackRequest], Future[tuple[Lease, Filled]]]

#: Seconds for the thread to end when the pipeline is closed.
_GRACE_SECONDS = 5.0


class Pipeline[Item]:
    """A thread that has several requests under way, finishes them in order, and stays one ahead of the consumer.

    Args:
        requests: Requests in order, possibly endless.
        start: Starts a request; called in the thread. Its errors reach the consumer after the batches before it.
        ahead: Number of requests under way.
        finish: Applied to every filled buffer in the thread; it may start a copy to a device.
        stop: Stops what :obj:`start` started, when the pipeline is closed; its argument is whether to wait.
        timeout: Seconds to wait for an item before that is an error.
    """

    def __init__(
        self,
        requests: Iterator[PackRequest],
        start: Start,
        ahead: int,
        finish: Finish[Item],
        stop: Callable[[bool], object],
        timeout: float,
    ):
        self._requests, self._start, self._ahead = requests, start, ahead
        self._finish, self._stop, self._timeout = finish, stop, timeout
        self._ready: queue.Queue[Any] = queue.Queue(maxsize=1)  # one ahead of the consumer
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vlmdata-pipeline", daemon=True)
        self._thread.start()

    def close(self, wait: bool = True) -> None:
        """Stops everything.

        Args:
            wait: Whether to wait until what fills buffers and the thread are gone.
        """
        self._stopped.set()
        wait = wait and self._thread is not threading.current_thread()  # garbage collection may run in any thread
        self._stop(wait)
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
                    "the workers and the disk, or raise `timeout`; the loader's state is valid."
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
        under_way: deque[tuple[PackRequest, Future[tuple[Lease, Filled]]]] = deque()
        try:
            self._put(self._make(under_way))
        except BaseException as error:
            self._put(error)
        finally:
            self._stopped.set()
            for _, future in under_way:
                if not future.cancel():
                    future.add_done_callback(_release)

    def _make(self, under_way: deque[tuple[PackRequest, Future[tuple[Lease, Filled]]]]) -> Exception | None:
        """Passes items on until the requests end. Returns why they do, if that is an error."""
        failure = self._fill(under_way)
        while under_way and not self._stopped.is_set():
            request, future = under_way.popleft()
            try:
                lease, filled = future.result()
            finally:
                del future  # an error's traceback refers to it, and it to the error
            failure = failure or self._fill(under_way)
            if self._stopped.is_set():
                lease.release()
            else:
                self._put(self._finish(request, lease, filled))
        return failure

    def _fill(self, under_way: deque[tuple[PackRequest, Future[tuple[Lease, Filled]]]]) -> Exception | None:
        """Starts requests until enough are under way. Returns why there are no more, if that is an error."""
        while len(under_way) < self._ahead and not self._stopped.is_set():
            try:
                request = next(self._requests)
                under_way.append((request, self._start(request)))
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


def _release(future: Future[tuple[Lease, Filled]]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result()[0].release()
