"""The connection to one server of a collation service."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.flight as flight
import xxhash

from vlmdata.errors import ConfigMismatchError, ResourceError, UsageError
from vlmdata.loader.config import Service
from vlmdata.loader.fill.filler import DAMAGE, Filled
from vlmdata.service.address import Server, ServiceAddress
from vlmdata.service.protocol import (
    DESCRIBE,
    PROTOCOL,
    BatchQuery,
    Description,
    FileQuery,
    Header,
    decode_error,
    decode_trailer,
)
from vlmdata.service.shared_memory import Maps, SharedMemoryError, this_place
from vlmdata.wording import counted

_log = logging.getLogger("vlmdata.service.client")

# gRPC would write a line to stderr for each attempt whose handshake fails; the error that is raised says the same.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

Bytes = npt.NDArray[np.uint8]

#: Of gRPC: a server that answers no ping for this long is gone, even if its machine still acknowledges packets.
_KEEPALIVE_MS, _KEEPALIVE_TIMEOUT_MS = 10_000, 5_000
_SECONDS_TO_DESCRIBE = 10.0
#: Times that a server's memory could not be read, after which this connection asks for bytes only.
_MOST_SHARED_FAILURES = 3


#: Why connecting failed, in gRPC's words, if the server's certificate or its absence is the cause; and the remedy.
_OF_CERTIFICATES = {
    "wrong version number": "this server speaks clear text: use grpc:// instead of grpc+tls://",
    "certificate verify failed": "give the authority of its certificate (tls_ca), or that of this client (tls_cert)",
    "is not in peer certificate": "name the server as its certificate does",
}
#: The same, if the cause may be in the caller's settings. Asking again can help.
_OF_SETTINGS = {
    "Expected SETTINGS frame": "this port speaks no gRPC: is it that of --metrics-port, or of another program?",
    "Socket closed": "does the server have a certificate? Then use grpc+tls://, and tls_cert if it wants yours",
}


class ServerLostError(Exception):
    """A server is gone, overloaded, draining or too slow. Another one, or the same one later, can answer.

    Attributes:
        has_remedy: Whether the message says what the caller can do.
    """

    def __init__(self, message: str, remedy: str | None = None):
        super().__init__(message if remedy is None else f"{message} ({remedy})")
        self.has_remedy = remedy is not None


class CertificateError(ServerLostError):
    """A server's certificate is not one that this client accepts, or it has none. It will not have another one soon."""


class TokenRefusedError(UsageError):
    """A server refuses the token. It may have been replaced in its file since it was read."""


#: Errors after which another server may answer.
OF_ONE_SERVER = (ServerLostError, ConfigMismatchError, UsageError, ResourceError, *DAMAGE)


def more_telling(earlier: Exception | None, error: Exception) -> Exception:
    """Returns the error of a server to show: the latest one, unless only an earlier one says what to do."""
    if isinstance(earlier, ServerLostError) and earlier.has_remedy and isinstance(error, ServerLostError):
        return error if error.has_remedy else earlier
    return error


def in_thread[Result](function: Callable[[], Result]) -> Future[Result]:
    """Runs a function in a thread that does not keep the program alive: gRPC may wait for a dead server."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="vlmdata-call", daemon=True).start()
    return future


class Call:
    """A query under way, which another thread can cancel."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reader: Any = None
        self.cancelled = False

    def follow(self, reader: Any) -> None:
        """Makes :meth:`cancel` end this reader."""
        with self._lock:
            self._reader = reader
            if self.cancelled:
                reader.cancel()

    def cancel(self) -> None:
        """Ends the query; it raises :class:`ServerLostError` in its thread."""
        with self._lock:
            self.cancelled = True
            if self._reader is not None:
                self._reader.cancel()


class Connection:
    """A server, connected on first use. Thread-safe."""

    def __init__(self, server: Server, address: ServiceAddress, options: Service):
        self.server = server
        self._place, self._shared_failures = this_place() if options.shared_memory else "", 0
        self._maps = Maps()
        self._headers = authorization(address, options)
        tls: dict[str, Any] = {}
        if address.tls:
            tls = {
                "tls_root_certs": _read(options.tls_ca, "tls_ca"),
                "cert_chain": _read(options.tls_cert, "tls_cert"),
                "private_key": _read(options.tls_key, "tls_key"),
                "override_hostname": server.name or None,
            }
        arguments = [
            ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1_000),  # a restarted server is used again at once
        ]
        self._client = flight.FlightClient(
            f"{'grpc+tls' if address.tls else 'grpc'}://{server}", generic_options=arguments, **tls
        )

    def describe(self, timeout: float = _SECONDS_TO_DESCRIBE) -> Description:
        """Returns what the server says of itself: ServerLostError without an answer, VlmdataError if it refuses."""
        description = Description.decode(self.action(DESCRIBE, min(timeout, _SECONDS_TO_DESCRIBE)))
        if description.protocol != PROTOCOL:
            raise ConfigMismatchError(
                f"server {self.server}: speaks protocol {description.protocol} (vlmdata {description.vlmdata}), this "
                f"client {PROTOCOL}. Install the same version of vlmdata on both."
            )
        return description

    def action(self, name: str, timeout: float = _SECONDS_TO_DESCRIBE) -> bytes:
        """Returns the answer to an action. Raises the errors of :meth:`describe`."""
        try:
            return b"".join(each.body.to_pybytes() for each in self._client.do_action(name, self._options(timeout)))
        except (pa.ArrowException, OSError) as error:
            raise self._translated(error) from error

    def file(self, query: FileQuery, timeout: float) -> Iterator[memoryview]:
        """Yields the bytes of a file. Raises the errors of :meth:`describe`."""
        try:
            for chunk in self._client.do_get(flight.Ticket(query.encode()), self._options(timeout)):
                yield memoryview(_bytes(chunk))
        except (pa.ArrowException, OSError) as error:
            raise self._translated(error) from error

    def batch(self, query: BatchQuery, buffer: Bytes, size: int, checked: bool, timeout: float, call: Call) -> Filled:
        """Fills a buffer with a batch of ``size`` bytes, if ``checked`` against the server's checksum.

        Raises:
            ServerLostError: If the server does not answer in time, is overloaded, or bytes were changed on the way.
            VlmdataError: If it refuses.
        """
        if self._place:
            try:
                filled = self._batch(query.to(self._place), buffer, size, checked, timeout, call)
            except SharedMemoryError as error:
                self._note_shared_failure(error)
            else:
                self._shared_failures = 0
                return filled
        return self._batch(query, buffer, size, checked, timeout, call)

    def close(self) -> None:
        """Closes the connection."""
        self._maps.clear()
        self._client.close()

    def _batch(self, query: BatchQuery, buffer: Bytes, size: int, checked: bool, timeout: float, call: Call) -> Filled:
        reader = None
        try:
            reader = self._client.do_get(flight.Ticket(query.encode()), self._options(timeout))
            call.follow(reader)
            return self._receive(reader, buffer[:size], checked, bool(query.place))
        except (pa.ArrowException, OSError) as error:
            raise self._translated(error) from error
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ServerLostError(f"server {self.server}: the answer is not a batch ({error!r})") from error
        finally:
            if reader is not None:
                reader.cancel()  # otherwise an answer that is not read to its end holds memory at the server

    def _receive(self, reader: Any, buffer: Bytes, checked: bool, may_share: bool) -> Filled:
        chunks = iter(reader)
        if (first := next(chunks, None)) is None:
            raise ServerLostError(f"server {self.server}: the answer is empty")
        header = Header.decode(first.app_metadata.to_pybytes())
        if header.size != len(buffer):
            raise ServerLostError(
                f"server {self.server}: this batch has {header.size} bytes there, {len(buffer)} here. Install the same "
                "version of vlmdata on both."
            )
        if header.shared is not None:
            if not may_share:  # it could name any file of this machine
                raise ServerLostError(f"server {self.server}: names memory instead of sending the bytes asked for")
            header.shared.copy(_bytes(first), buffer, self._maps)
        else:
            self._receive_bytes(chain([first], chunks), buffer, checked)
        return Filled(len(buffer), {n: f"server {self.server}: {text}" for n, text in header.damaged.items()})

    def _receive_bytes(self, chunks: Iterable[Any], buffer: Bytes, checked: bool) -> None:
        checksum, at, hashed = None, 0, xxhash.xxh3_64()
        for number, chunk in enumerate(chunks):
            if number and chunk.app_metadata is not None:
                checksum = decode_trailer(chunk.app_metadata.to_pybytes())
            data = _bytes(chunk)
            if at + len(data) > len(buffer):
                break
            buffer[at : at + len(data)] = data
            at += len(data)
            if checked:
                hashed.update(data)
        if checksum is None or at != len(buffer):
            raise ServerLostError(f"server {self.server}: the answer ended after {at} of {len(buffer)} bytes")
        if checked and hashed.intdigest() != checksum:
            raise ServerLostError(f"server {self.server}: bytes of the batch were changed on the way")

    def _note_shared_failure(self, error: SharedMemoryError) -> None:
        self._shared_failures += 1
        if self._shared_failures == _MOST_SHARED_FAILURES:
            self._place = ""
            _log.info("server %s: its memory cannot be read (%s); fetches the bytes.", self.server, error)

    def _options(self, timeout: float) -> Any:
        return flight.FlightCallOptions(timeout=timeout, headers=self._headers)

    def _translated(self, error: Exception) -> Exception:
        """Returns the error to raise for one of Flight."""
        if isinstance(error, flight.FlightServerError) and error.extra_info:
            return decode_error(error.extra_info, str(self.server))
        if isinstance(error, flight.FlightUnauthenticatedError | flight.FlightUnauthorizedError):
            if not self._headers:
                return TokenRefusedError(
                    f"server {self.server}: wants a token. Give a file that holds one: service_token_file"
                )
            return TokenRefusedError(
                f"server {self.server}: the token was refused. Put a valid one into the file of service_token_file."
            )
        self._maps.clear()  # it may be gone, and its memory with it
        return lost(self.server, error)


def _bytes(chunk: Any) -> Bytes:
    """Returns the bytes of a record batch, or raises a ValueError if it holds anything else."""
    data: Bytes = chunk.data.column(0).to_numpy(zero_copy_only=True)
    if data.dtype != np.uint8:
        raise ValueError(f"a record batch of {data.dtype}, not of bytes")
    return data


def authorization(address: ServiceAddress, options: Service) -> list[tuple[bytes, bytes]]:
    """Returns the headers that prove who asks; a UsageError for a token that cannot be read or is not safe to send."""
    if options.service_token_file is None:
        return []
    if not (address.tls or address.is_local or options.service_insecure):
        raise UsageError(
            f"{address.text}: would send the token in clear text over the network. Use grpc+tls://, or "
            "service_insecure=True if the network is trusted."
        )
    return [(b"authorization", b"Bearer " + _token(options.service_token_file))]


def _token(path: str | os.PathLike[str]) -> bytes:
    """Returns the token in a file. Errors do not show the path: some give the token itself in its place."""
    try:
        lines = [line for line in map(bytes.strip, Path(path).read_bytes().splitlines()) if line]
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no path"
        raise UsageError(
            f"service_token_file: cannot be read: {reason}. Give the path of a file that holds the token, not the "
            "token itself."
        ) from None
    if len(lines) != 1:
        raise UsageError(
            f"service_token_file: the file has {counted(len(lines), 'line')}; it must hold one token, on one line"
        )
    return lines[0]


def _read(path: Any, option: str) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{option} {path}: cannot be read: {error.strerror}") from error


def lost(server: Server, error: Exception) -> ServerLostError:
    """Returns the error of a lost server from one of Flight, without gRPC's debug context.

    Flight raises one class for all failures to connect, and gRPC gives their causes only as text. So this is the one
    place that reads the text. If gRPC's words change, the remedy is missing, and a client asks a server whose
    certificate is wrong until its time is over.
    """
    text = str(error).partition(". gRPC client debug context")[0].strip()
    text = (text.partition("with message: ")[2] or text).partition(". Detail: ")[0] or type(error).__name__
    message = f"server {server}: {text}"
    if "failed to connect" in text:
        for kind, remedies in ((CertificateError, _OF_CERTIFICATES), (ServerLostError, _OF_SETTINGS)):
            for words, remedy in remedies.items():
                if words in text:
                    return kind(message, remedy)
    return ServerLostError(message)
