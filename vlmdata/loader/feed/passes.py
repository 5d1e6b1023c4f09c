"""Passes over a loader: one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from weakref import WeakKeyDictionary

from vlmdata.errors import UsageError


class Passes[Item]:
    """The unfinished passes over a loader, and the thread of each.

    Passes of one thread share the loader's position. A second thread is refused while a pass of another living thread
    is unfinished: two threads that wait for the same batch would wait until the timeout.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Weak: leaving a loop drops its iterator, which ends the pass.
        self._threads: WeakKeyDictionary[Pass[Item], threading.Thread] = WeakKeyDictionary()

    def enter(self, one: Pass[Item]) -> None:
        """Begins to take an item.

        Raises:
            UsageError: If another thread has an unfinished pass, or is taking an item of this one.
        """
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

    def leave(self, one: Pass[Item]) -> None:
        """Ends a pass."""
        with self._lock:
            self._threads.pop(one, None)


class Pass[Item](Iterator[Item]):
    """One pass over a loader.

    Args:
        passes: All passes over the loader.
        items: What it yields.

    Attributes:
        taking: Whether a thread is taking an item.
    """

    def __init__(self, passes: Passes[Item], items: Iterator[Item]):
        self._passes, self._items = passes, items
        self.taking = False

    def __next__(self) -> Item:
        self._passes.enter(self)
        try:
            return next(self._items)
        except BaseException:
            self._passes.leave(self)
            raise
        finally:
            self.taking = False
