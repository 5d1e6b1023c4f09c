"""Connections of the served page, which strangers may reach: none stays open with half a request."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

#: Time for a request to arrive, however little of it comes at a time. Idle connections are closed sooner.
_SECONDS_OF_A_REQUEST = 10.0


class BoundedHttp(H11Protocol):
    """HTTP that closes a connection whose request has not arrived in time. uvicorn waits for it without a limit."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the time of the first request."""
        super().connection_made(transport)
        self._deadline: asyncio.TimerHandle | None = None
        self._follow()

    def data_received(self, data: bytes) -> None:
        """Ends the time once a request is complete, and starts that of the next one."""
        super().data_received(data)
        self._follow()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the time."""
        super().connection_lost(exc)
        if self._deadline is not None:
            self._deadline.cancel()

    def _follow(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None
        elif self._deadline is None:
            self._deadline = self.loop.call_later(_SECONDS_OF_A_REQUEST, self.transport.abort)


def server_of(app: ASGIApp, **options: Any) -> uvicorn.Server:
    """Returns the server of an application, with further options of uvicorn."""
    # uvicorn's own logging configuration would close handlers that others installed.
    settings: dict[str, Any] = {"log_config": None, "log_level": "warning", "access_log": False, "ws": "none"}
    return uvicorn.Server(uvicorn.Config(app, http=BoundedHttp, server_header=False, **{**settings, **options}))
