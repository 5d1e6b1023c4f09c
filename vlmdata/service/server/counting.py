"""What a server counts for Prometheus. Without ``--metrics-port`` it counts nothing, and needs no package for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vlmdata.errors import UsageError
from vlmdata.service.server.config import ServerConfig


@dataclass(frozen=True)
class Shown:
    """A value that the server has anyway, and that is shown; ``counts`` if it only grows."""

    name: str
    text: str
    value: float
    counts: bool = False


class Counting:
    """Takes counts and forgets them. :class:`vlmdata.service.server.metrics.Metrics` keeps them, and has a port."""

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


def counting(config: ServerConfig, shown: Callable[[], list[Shown]], is_draining: Callable[[], bool]) -> Counting:
    """Returns real counters if there is a port to show them; a UsageError if a package for that is not installed."""
    if config.metrics_port is None:
        return Counting()
    try:
        from vlmdata.service.server.metrics import Metrics
    except ImportError as error:
        raise UsageError(f"--metrics-port needs a package ({error}): pip install 'vlmdata[service]'") from error
    return Metrics(config.host, config.metrics_port, shown, is_draining)
