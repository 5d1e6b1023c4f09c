"""The metrics' HTTP server, which strangers may reach."""

from __future__ import annotations

from socketserver import ThreadingMixIn
from typing import Any

import pytest

from vlmdata.service import metrics


def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a thread until its request has arrived, and nobody needs a token for one."""
    answered: list[Any] = []
    refused: list[Any] = []
    monkeypatch.setattr(ThreadingMixIn, "process_request", lambda _, request, __: answered.append(request))
    monkeypatch.setattr(ThreadingMixIn, "process_request_thread", lambda *_: None)
    with metrics._Threads(("127.0.0.1", 0), metrics._Quiet) as server:
        monkeypatch.setattr(server, "shutdown_request", refused.append)
        for number in range(metrics._MAX_CONNECTIONS + 2):
            server.process_request(number, None)
        assert answered == list(range(metrics._MAX_CONNECTIONS))
        assert refused == [metrics._MAX_CONNECTIONS, metrics._MAX_CONNECTIONS + 1]
        server.process_request_thread(0, None)
        server.process_request(99, None)
        assert answered[-1] == 99
