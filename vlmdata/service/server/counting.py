"""What a server counts for Prometheus. Without ``--metrics-port`` it counts nothing, and needs no package for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vlmdata.errors import UsageError

if TYPE_CHECKING:
    from vlmdata.service.server.server import CollationServer


class Counting:
    """Takes counts and forgets them. :class:`vlmdata.service.server.metrics.Metrics` keeps them.

    Attributes:
        port: Port of the HTTP server that shows them; None without one.
    """

    port: int | None = None

    def sent(self, size: int) -> None:
        """Counts a batch that was sent."""

    def answered(self, seconds: float) -> None:
        """Counts a query whose answer begins."""

    def refused(self, reason: str) -> None:
        """Counts a query that is not answered."""

    def serve(self) -> None:
        """Starts the HTTP server, if there is a port for it."""

    def close(self) -> None:
        """Stops it."""


def counting(server: CollationServer) -> Counting:
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
