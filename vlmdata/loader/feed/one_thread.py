"""Iterators over a loader: one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from vlmdata.errors import UsageError


class OneThread:
    """Lets one thread at a time iterate over a loader.

    Iterators of one thread share the loader's position. A second thread is refused while an iterator of another living
    thread is unfinished: two threads that wait for the same batch would wait until the timeout.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Weak: leaving a loop drops its iterator, which ends it.
        self._threads: WeakKeyDictionary[LoaderIterator[Any], threading.Thread] = WeakKeyDictionary()

    def enter(self, one: LoaderIterator[Any]) -> None:
        """Begins to take an item; a UsageError if another thread is in an unfinished iterator, or in this one."""
        here = threading.current_thread()
        with self._lock:
            for each, thread in self._threads.items():
                if thread is not here and thread.is_alive() and (each is not one or each.taking):
                    raise UsageError(
                        f"thread {here.name} iterates a StreamingLoader that thread {thread.name} is iterating: one "
                        "thread at a time iterates over a loader. Create a loader for each thread, or finish the other "
                        "pass first (leave its loop and drop its iterator)"
                    )
            self._threads[one] = here
            one.taking = True

    def leave(self, one: LoaderIterator[Any]) -> None:
        """Ends an iterator."""
        with self._lock:
            self._threads.pop(one, None)


class LoaderIterator[Item](Iterator[Item]):
    """An iterator over a loader, for one thread at a time. ``taking``: whether a thread is taking an item."""

    def __init__(self, threads: OneThread, items: Iterator[Item]):
        self._threads, self._items = threads, items
        self.taking = False

    def __next__(self) -> Item:
        self._threads.enter(self)
        try:
            return next(self._items)
        except BaseException:
            self._threads.leave(self)
            raise
        finally:
            self.taking = False
