"""Ports for processes that cannot choose one themselves."""

from __future__ import annotations

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """One that is still free when a process listens, seconds later: the system gives out those from 32,768 on."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
