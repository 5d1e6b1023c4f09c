"""Workers of pytest-xdist that share one import of what tests import: 8 s of CPU time each to collect, not 26."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from execnet import gateway_io
from execnet.gateway_base import Popen2IO

from tests.forked import MODELS, Forked

#: Servers of processes that tests of one worker start one after the other; one too many costs its imports.
NURSERIES = 6


class _ForkedWorker(gateway_io.Popen2IOMaster):
    """The connection to a worker, which is forked instead of started."""

    def __init__(self, args: Any, execmodel: Any):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.popen = Forked(f"{__name__}:main", args, server=MODELS, nurseries=NURSERIES, **pipes)
        Popen2IO.__init__(self, self.popen.stdin, self.popen.stdout, execmodel=execmodel)


def fork_workers() -> None:
    """Has pytest-xdist fork the workers that it starts from now on."""
    gateway_io.Popen2IOMaster = _ForkedWorker  # type: ignore[misc]


def main() -> None:
    """What execnet has a new interpreter do."""
    sys.argv = ["-c"]
    exec(eval(sys.stdin.readline()))  # `gateway_io.popen_bootstrapline`
