"""Who may ask, and how often."""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow.flight as flight

from vlmdata.errors import UsageError

_log = logging.getLogger("vlmdata.service")

_SECONDS_BETWEEN_LOOKS = 1.0
_MAX_PEERS = 4096
_BURST = 2.0


class TokenFile:
    """The valid tokens: the lines of a file, which is read again when it changes. Thread-safe.

    While it cannot be read or holds none, as when it is being replaced, the earlier tokens stay valid.
    """

    def __init__(self, path: Path):
        self._path = path
        self._lock = threading.Lock()
        self._looked = time.monotonic()
        try:
            self._stamp, self._tokens = self._read()
        except OSError as error:
            raise UsageError(f"--token-file {path}: cannot be read: {error.strerror}") from error
        if not self._tokens:
            raise UsageError(f"--token-file {path}: has no token; write one on each line")

    def accepts(self, token: str) -> bool:
        """Returns whether a token is valid. Takes the same time for all tokens of a length."""
        given = token.encode()
        return sum(hmac.compare_digest(given, each) for each in self._current()) > 0  # compares all of them

    def _current(self) -> tuple[bytes, ...]:
        with self._lock:
            if time.monotonic() - self._looked >= _SECONDS_BETWEEN_LOOKS:
                self._looked = time.monotonic()
                try:
                    if self._stamp != _stamp(self._path):
                        self._stamp, tokens = self._read()
                        if tokens:
                            self._tokens = tokens
                            _log.info("token file read again", extra={"tokens": len(tokens)})
                        else:
                            _log.warning("token file has no token; the earlier tokens stay valid")
                except OSError as error:
                    _log.warning(
                        "token file cannot be read; the earlier tokens stay valid", extra={"error": str(error)}
                    )
            return self._tokens

    def _read(self) -> tuple[tuple[int, ...], tuple[bytes, ...]]:
        stamp = _stamp(self._path)
        lines = (line.strip() for line in self._path.read_bytes().splitlines())
        return stamp, tuple(line for line in lines if line and not line.startswith(b"#"))


def _stamp(path: Path) -> tuple[int, ...]:
    """Returns what changes when a file is written or replaced."""
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino


class TokenCheck(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Rejects calls without a valid token, before they are read. Logs each, and calls ``refused``."""

    def __init__(self, tokens: TokenFile, refused: Callable[[], None]):
        super().__init__()
        self._tokens, self._refused = tokens, refused

    def start_call(self, info: Any, headers: Mapping[str, Sequence[str]]) -> None:
        """Checks the header ``authorization: Bearer TOKEN`` of a call."""
        given = next((values[0] for name, values in headers.items() if name.lower() == "authorization"), "")
        scheme, _, token = given.partition(" ")
        if scheme.lower() != "bearer" or not self._tokens.accepts(token.strip()):
            self._refused()
            _log.warning("token refused", extra={"given": bool(token)})  # Flight does not say here who asks
            raise flight.FlightUnauthenticatedError("a valid token is needed: authorization: Bearer TOKEN")


class RateLimit:
    """A token bucket for each client machine: queries a second, in bursts of twice as many. Thread-safe."""

    def __init__(self, rate: float):
        self._rate = rate
        self._lock = threading.Lock()
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def allows(self, machine: str) -> bool:
        """Counts a query, and returns whether it is within the limit."""
        now = time.monotonic()
        with self._lock:
            full = max(self._rate * _BURST, 1.0)
            left, then = self._buckets.get(machine, (full, now))
            left = min(left + (now - then) * self._rate, full)
            allowed = left >= 1
            self._buckets[machine] = (left - 1 if allowed else left, now)
            self._buckets.move_to_end(machine)
            if len(self._buckets) > _MAX_PEERS:
                self._buckets.popitem(last=False)
        return allowed


def machine_of(peer: str) -> str:
    """Returns the machine in the name of a peer, such as ``ipv4:10.0.0.7:41234`` or ``ipv6:%5B::1%5D:41234``."""
    return unquote(peer).rpartition(":")[0]
