"""Starts worker processes one at a time.

filelock, which every program with the Hugging Face hub imports, rejects a fork while another thread forks. Two loaders
in one process, one to train and one to evaluate, start their workers from two threads.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from multiprocessing.context import BaseContext, ForkContext, ForkProcess

#: Seconds to wait before each further attempt, when another thread's fork was in the way.
_PAUSES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)

_one_at_a_time = threading.Lock()


def _renew_lock() -> None:
    global _one_at_a_time
    _one_at_a_time = threading.Lock()


# A process forked while another thread held the lock would wait for it forever.
os.register_at_fork(after_in_child=_renew_lock)


class _Worker(ForkProcess):
    def start(self) -> None:
        with _one_at_a_time:
            for pause in _PAUSES:
                try:
                    return super().start()
                except RuntimeError:
                    time.sleep(pause)
            return super().start()


class _OneAtATime(ForkContext):
    Process = _Worker


def worker_context(method: str | None) -> BaseContext:
    """Returns the multiprocessing context for loader workers.

    Args:
        method: Start method; None means the interpreter's default.

    Raises:
        ValueError: If the platform has no such method.
    """
    context = multiprocessing.get_context(method)
    return _OneAtATime() if context.get_start_method() == "fork" else context
