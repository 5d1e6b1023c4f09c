"""CPU seconds of test files, with all processes that they start: ``pytest -p tests.cpu_times -n 0 tests/X``.

Time by the clock says little on a busy machine. The seconds are those of this process, of its descendants that live and
of those that ended. One process runs the tests: with several, forked programs belong to none of them.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from pathlib import Path

import pytest

_TICKS = os.sysconf("SC_CLK_TCK")
_seconds: Counter[str] = Counter()
_before = 0.0


def pytest_collection_finish() -> None:
    """Begins: what comes before is imports."""
    global _before
    _before = _cpu_seconds()


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Adds what a phase of a test took to its file."""
    global _before
    now = _cpu_seconds()
    _seconds[report.nodeid.partition("::")[0]] += now - _before
    _before = now


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the most expensive files."""
    terminalreporter.section(f"{sum(_seconds.values()):.0f} CPU seconds")
    for file, seconds in _seconds.most_common(40):
        terminalreporter.write_line(f"{seconds:7.1f} {file}")


def _cpu_seconds() -> float:
    """Of this process and all its descendants."""
    own, children, seconds = os.times(), defaultdict(list), {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        children[int(fields[1])].append(int(folder.name))
        seconds[int(folder.name)] = sum(map(int, fields[11:15])) / _TICKS
    total, waiting = sum(own[:4]), children[os.getpid()]
    while waiting:
        process = waiting.pop()
        total += seconds[process]
        waiting += children[process]
    return total
