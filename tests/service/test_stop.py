"""A server that is told to stop does so wherever its main thread is at that moment."""

from __future__ import annotations

import subprocess
import sys

#: The signal comes at each of the first lines that the wait runs, those of the standard library included.
_PROGRAM = """
import signal, sys
from vlmdata.cli.serve import Stop

def at_line(number):
    seen = 0
    def trace(frame, event, argument):
        nonlocal seen
        seen += event == "line"
        if event == "line" and seen == number:
            signal.raise_signal(signal.SIGTERM)
        return trace
    return trace

for number in range(1, 41):
    stop = Stop()
    sys.settrace(at_line(number))
    stop.wait(0.001)
    sys.settrace(None)
print("stopped each time")
"""


def test_a_signal_at_any_line_ends_the_wait() -> None:
    found = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=240)
    assert found.stdout == "stopped each time\n", found.stderr
