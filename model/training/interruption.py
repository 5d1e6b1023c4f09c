"""Signals to stop: remembered until the step is over, so that its result can be saved."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType


class Interruption:
    """Remembers the first signal to stop; the second one ends the process at once.

    Attributes:
        signal: Number of the signal, or None while there was none.
    """

    def __init__(self) -> None:
        self.signal: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if self.signal is not None:
            os.write(2, b"stopped at once, without saving\n")  # print might be what was interrupted
            raise KeyboardInterrupt
        self.signal = number

    def requested(self) -> bool:
        """Whether this process was told to stop."""
        return self.signal is not None

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Listens to ctrl-C and to what schedulers send."""
        before = {number: signal.signal(number, self) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
