"""What a server counts for Prometheus. Without ``--metrics-port`` it counts nothing, and needs no package for it."""

from __future__ import annotations

from collections.abc import Sized
from typing import Protocol

from vlmdata.service.server.config import ServerConfig
from vlmdata.service.server.packs import Packs
from vlmdata.service.server.plans import PlanBook


class GivingUp(Sized, Protocol):
    """Answers under way, of which some were given up."""

    @property
    def given_up(self) -> int:
        """Number of those that were given up."""


class ServerState(Protocol):
    """What is shown of a server that it has anyway."""

    @property
    def config(self) -> ServerConfig:
        """Its options."""

    @property
    def is_draining(self) -> bool:
        """Whether it takes no more queries."""

    @property
    def packs(self) -> Packs:
        """Its packs."""

    @property
    def plans(self) -> PlanBook:
        """Its plans."""

    @property
    def answers(self) -> GivingUp:
        """Answers under way."""

    @property
    def files(self) -> GivingUp:
        """Files under way."""

    @property
    def restarts(self) -> int:
        """Workers that were replaced."""

    @property
    def damaged_files(self) -> int:
        """Files in which damage was met."""


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
