"""Records signals to stop until the step is complete, so that its result can be saved."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from multiprocessing import resource_tracker
from types import FrameType

_STOPPING = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Records the number of the first ``signal`` to stop; a second signal ends the process at once."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if self.signal is not None:
            os.write(2, b"stopped at once, without saving\n")  # the signal may have interrupted print
            raise KeyboardInterrupt
        self.signal = number

    def requested(self) -> bool:
        """Returns True if this process was asked to stop."""
        return self.signal is not None

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Handles ctrl-C and the signals of schedulers."""
        before = {number: signal.signal(number, self) for number in _STOPPING}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def shielding_children() -> Iterator[None]:
    """Keeps ctrl-C and SIGTERM from processes started within, for as long as they live.

    A terminal's ctrl-C, ``timeout`` and ``torchrun`` signal the whole process group. The trainer then saves, and what
    writes for it must live on. A child inherits the signals that its parent blocks; the parent gets its own afterwards.
    """
    resource_tracker.ensure_running()  # its start, part of a spawn, would unblock the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
