"""The metrics' HTTP server, which strangers may reach."""

from __future__ import annotations

import sys
from socketserver import ThreadingMixIn
from types import SimpleNamespace
from typing import Any

import pytest

from vlmdata.errors import UsageError
from vlmdata.service import metrics
from vlmdata.service.counting import counting


def test_their_package_is_needed_only_with_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vlmdata.service.metrics", None)
    server: Any = SimpleNamespace(config=SimpleNamespace(metrics_port=None))
    without = counting(server)
    without.sent(1)
    without.serve()
    assert without.port is None
    server.config.metrics_port = 0
    with pytest.raises(UsageError, match=r"--metrics-port needs a package .*: pip install 'vlmdata\[service\]'"):
        counting(server)


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
