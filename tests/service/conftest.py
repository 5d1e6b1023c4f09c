"""The small datasets of the loader's tests, and a server of both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.loader.conftest import chat, receipts  # noqa: F401
from tests.service.servers import Server, serving


@pytest.fixture(scope="session")
def server(chat: Path, receipts: Path) -> Iterator[Server]:  # noqa: F811
    """A server of both datasets, for tests that do it no harm."""
    with serving(chat, receipts, "-j", 1, "--memory", "64M", "--metrics-port", 0) as running:
        yield running
