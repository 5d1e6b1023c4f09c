"""Batches that a thread makes ahead of the consumer."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from vlmdata.errors import ResourceError


class Pipeline[Item](ABC):
    """A thread that makes items in order and stays one ahead of the consumer.

    A subclass implements :meth:`make`, calls :meth:`put` for each item, and calls :meth:`start` once it is ready.

    Args:
        timeout: Seconds to wait for an item before that is an error.
    """

    def __init__(self, timeout: float):
        self._timeout = timeout
        self._ready: queue.Queue[Any] = queue.Queue(maxsize=1)  # one ahead of the consumer
        self.stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vlmdata-pipeline", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @abstractmethod
    def make(self) -> None:
        """Puts items until :attr:`stopped` is set. An exception reaches the consumer after the items before it."""

    def clean_up(self) -> None:  # noqa: B027 - most need none
        """Runs in the thread at its end."""

    @abstractmethod
    def close(self, wait: bool = True) -> None:
        """Stops everything.

        Args:
            wait: Whether to wait until workers and thread are gone.
        """

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

    def put(self, item: Any) -> None:
        """Passes an item, an exception or None (the end) to the consumer. Waits until it has taken the one before."""
        while not self.stopped.is_set():
            try:
                self._ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller runs in the pipeline's thread."""
        return self._thread is threading.current_thread()

    def join(self, seconds: float) -> None:
        """Waits for the thread."""
        self._thread.join(timeout=seconds)

    def _run(self) -> None:
        try:
            self.make()
        except BaseException as error:
            self.put(error)
        finally:
            self.clean_up()
