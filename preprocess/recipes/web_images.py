"""Fetches files at web addresses, within a time, a size, and public networks.

Rows are data of others. An address in them must not make this machine ask servers that only it can reach, such as the
metadata service of a cloud. So each connection is checked, also those of redirects, by the addresses of its host.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Any
from urllib.parse import urlsplit

from requests import PreparedRequest, RequestException, Response, Session
from requests.adapters import HTTPAdapter
from requests.utils import select_proxy
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.connection import HTTPConnection, HTTPSConnection

from vlmdata.preprocess.recipes.file_kinds import FileKind
from vlmdata.preprocess.recipes.remote_root import FetchProblem
from vlmdata.preprocess.reject import excerpt

_TIMEOUT_SECONDS = (10, 60)  # for connecting, and between two packets
#: For an image, with redirects and further attempts. Larger files have more time.
_DEADLINE_SECONDS = 300.0
#: Seconds before the second and third attempt.
_PAUSES = (0.1, 0.5)
_NAT64 = IPv6Network("64:ff9b::/96")


def download(url: str, kind: FileKind, private_hosts: Iterable[str] = ()) -> bytes:
    """Returns the file at an address.

    Args:
        url: The address.
        kind: What the file should be.
        private_hosts: Hosts that may be in a private network, as ``host`` or ``host:port``.

    Raises:
        FetchProblem: If it is too large or not to be had.
    """
    problem: object = None
    deadline = _DEADLINE_SECONDS * kind.patience
    hosts = frozenset(host.lower() for host in private_hosts)
    with _fetching(hosts, deadline) as fetch, Session() as session:
        for scheme in ("http://", "https://"):
            session.mount(scheme, _Adapter())
        for pause in (0.0, *_PAUSES):
            time.sleep(pause)
            try:
                return _once(session, fetch, url, kind)
            except (RequestException, ValueError) as error:
                problem = error
            except _Refused as refused:
                raise FetchProblem(kind.fetch, f"{excerpt(url)}: {refused}") from refused
            if fetch.ended:
                break
    if fetch.ended:
        raise FetchProblem(kind.fetch, f"{excerpt(url)}: the {kind.name} did not arrive within {deadline:g} seconds")
    raise FetchProblem(kind.fetch, f"{excerpt(url)}: {len(_PAUSES) + 1} attempts failed, the last with: {problem}")


def _once(session: Session, fetch: _Fetch, url: str, kind: FileKind) -> bytes:
    with session.get(url, stream=True, timeout=_TIMEOUT_SECONDS) as response:
        if 400 <= response.status_code < 500 and response.status_code != 429:
            raise FetchProblem(kind.fetch, f"{excerpt(url)}: HTTP status {response.status_code}")
        response.raise_for_status()
        received = bytearray()
        for chunk in response.iter_content(1 << 20):
            received += chunk
            if len(received) > kind.most_bytes:
                raise FetchProblem(
                    kind.too_large, f"{excerpt(url)} gives more than {kind.most_bytes} bytes; {kind.smaller}"
                )
    if fetch.ended:  # a closed connection looks like the end of a body without a length
        raise RequestException("the time is over")
    return bytes(received)


class _Refused(Exception):
    """A host may not be asked."""


class _Fetch:
    """The limits of a fetch that is under way."""

    def __init__(self, private_hosts: frozenset[str]):
        self.ended = False
        self._private_hosts = private_hosts
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()

    def require_public(self, host: str, port: int | None, addresses: Iterable[str]) -> None:
        """Checks the addresses of a host.

        Raises:
            _Refused: If one is not public, and the user did not name the host.
        """
        name = host.lower().strip("[]").rstrip(".")
        names = {name, f"{name}:{port}", f"[{name}]", f"[{name}]:{port}"}
        if not self._private_hosts.isdisjoint(names):
            return
        for address in addresses:
            if not is_public(address):
                raise _Refused(
                    f"host {host} has the address {address}, which is not public; if it may be asked, give "
                    f"--allow-private-host {name}"
                )

    def watch(self, connection: socket.socket) -> None:
        """Closes a connection when the time is over."""
        with self._lock:
            # A second handle, because TLS takes the first one over.
            self._sockets.append(connection.dup())
        if self.ended:
            self.end()

    def end(self) -> None:
        """Ends the fetch: reads of its connections return nothing more."""
        self.ended = True
        with self._lock:
            for connection in self._sockets:
                with suppress(OSError):  # it is closed already
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the handles."""
        with self._lock:
            for connection in self._sockets:
                connection.close()
            self._sockets.clear()


_current: ContextVar[_Fetch] = ContextVar("the fetch of this thread")


@contextmanager
def _fetching(private_hosts: frozenset[str], deadline: float) -> Iterator[_Fetch]:
    fetch = _Fetch(private_hosts)
    timer = threading.Timer(deadline, fetch.end)
    timer.daemon = True
    token = _current.set(fetch)
    timer.start()
    try:
        yield fetch
    finally:
        timer.cancel()
        _current.reset(token)
        fetch.close()


class _Http(HTTPConnection):
    def _new_conn(self) -> socket.socket:
        return _checked(self, super()._new_conn)


class _Https(HTTPSConnection):
    def _new_conn(self) -> socket.socket:
        return _checked(self, super()._new_conn)


def _checked(connection: HTTPConnection, connect: Any) -> socket.socket:
    """Connects to a host if it may be asked. A proxy, which the user named, may have any address."""
    fetch, direct = _current.get(), connection.proxy is None
    if direct:
        fetch.require_public(connection.host, connection.port, _addresses(connection.host, connection.port))
    made: socket.socket = connect()
    try:
        if direct:  # a name may have another address than a moment ago
            fetch.require_public(connection.host, connection.port, [made.getpeername()[0]])
        fetch.watch(made)
    except BaseException:
        made.close()
        raise
    return made


class _HttpPool(HTTPConnectionPool):
    ConnectionCls = _Http


class _HttpsPool(HTTPSConnectionPool):
    ConnectionCls = _Https


_POOLS = {"http": _HttpPool, "https": _HttpsPool}


class _Adapter(HTTPAdapter):
    """Makes the connections of a session, also for redirects."""

    def init_poolmanager(self, *arguments: Any, **options: Any) -> None:
        super().init_poolmanager(*arguments, **options)
        self.poolmanager.pool_classes_by_scheme = _POOLS

    def proxy_manager_for(self, proxy: str, **options: Any) -> Any:
        manager = super().proxy_manager_for(proxy, **options)
        if not proxy.lower().startswith("socks"):
            manager.pool_classes_by_scheme = _POOLS
        return manager

    def send(self, request: PreparedRequest, *arguments: Any, **options: Any) -> Response:
        if select_proxy(request.url or "", options.get("proxies")):
            # The proxy resolves the name. If this machine can resolve it too, its addresses are checked.
            parts = urlsplit(request.url or "")
            host = str(parts.hostname)
            _current.get().require_public(host, parts.port, _addresses(host, parts.port))
        return super().send(request, *arguments, **options)


def _addresses(host: str, port: int | None) -> list[str]:
    """Returns the addresses of a host; none if its name is unknown."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [str(address[0]) for *_, address in found]


def is_public(text: str) -> bool:
    """Returns whether an address is in the public internet, also if it only carries one of another kind."""
    address = ip_address(text.partition("%")[0])
    if isinstance(address, IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = IPv4Address(int(address) & 0xFFFF_FFFF)
        if inner is not None:
            return is_public(str(inner))
        if address.is_site_local:
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved
