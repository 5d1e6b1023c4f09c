"""Fixtures of the tests of preprocessing."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import forkserver

import pytest


@pytest.fixture(scope="package", autouse=True)
def _own_server_of_processes() -> Iterator[None]:
    """Python keeps one server that processes are forked from. One that earlier tests started lacks what workers need,
    and each worker would import it again: 2.5 s of CPU time.
    """
    forkserver._forkserver._stop()
    yield
    forkserver._forkserver._stop()
