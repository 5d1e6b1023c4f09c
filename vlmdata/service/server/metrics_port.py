"""Counters of a server, if it has a port to show them."""

from __future__ import annotations

from vlmdata.errors import UsageError
from vlmdata.service.server.counting import Counting, ServerState


def counting(server: ServerState) -> Counting:
    """Returns what counts for a server: real counters if it has a port to show them.

    Raises:
        UsageError: If a package for that is not installed.
    """
    if server.config.metrics_port is None:
        return Counting()
    try:
        from vlmdata.service.server.metrics import Metrics
    except ImportError as error:
        raise UsageError(f"--metrics-port needs a package ({error}): pip install 'vlmdata[service]'") from error
    return Metrics(server)
