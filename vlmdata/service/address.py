"""Addresses of a collation service."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from vlmdata.errors import UsageError

DEFAULT_PORT = 8815
_SCHEMES = ("grpc", "grpc+tls")


@dataclass(frozen=True, order=True)
class Server:
    """A server; ``name`` is what its certificate must have, if ``host`` is an address that a name stands for."""

    host: str
    port: int
    name: str = ""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class ServiceAddress:
    """The address of a service as given (``text``), whether it is encrypted, and host and port of each server.

    ``dataset`` is a name or fingerprint there; "" means all datasets, in the service's order.
    """

    text: str
    tls: bool
    hosts: tuple[tuple[str, int], ...]
    dataset: str = ""

    @property
    def base(self) -> str:
        """The address without a dataset."""
        scheme, _, rest = self.text.partition("://")
        return f"{scheme}://{rest.partition('/')[0]}"

    def servers(self, earlier: Sequence[Server] = ()) -> tuple[Server, ...]:
        """Looks names up. A name has a server per address, or its ``earlier`` ones if it cannot be looked up now."""
        found: dict[Server, None] = {}
        for host, port in self.hosts:
            kept = [each for each in earlier if each.port == port and host in (each.name, each.host)]
            for server in _resolve(host, port) or kept or [Server(host, port)]:
                found.setdefault(server)
        return tuple(found)

    @property
    def has_names(self) -> bool:
        """Whether another look-up can give other servers."""
        return not all(_ip(host) or host == "localhost" for host, _ in self.hosts)

    @property
    def is_local(self) -> bool:
        """Whether all servers are on this machine."""
        return all(is_loopback(host) for host, _ in self.hosts)


def is_service(place: str) -> bool:
    """Returns whether a place of data is a collation service."""
    return place.partition("://")[0].lower() in _SCHEMES


def parse_address(text: str) -> ServiceAddress:
    """Parses ``grpc://host:8815,host2/dataset``, where port, later hosts and dataset are optional, or UsageError."""
    scheme, _, rest = text.partition("://")
    places, _, dataset = rest.partition("/")
    hosts = tuple(_host(place, text) for place in places.split(","))
    return ServiceAddress(text, scheme.lower() == "grpc+tls", hosts, dataset.strip("/"))


def is_loopback(host: str) -> bool:
    """Returns whether a host is this machine, without looking names up."""
    address = _ip(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def _host(place: str, text: str) -> tuple[str, int]:
    host, separator, port = place.strip().rpartition(":")
    if not separator or port.endswith("]"):
        host, port = place.strip(), str(DEFAULT_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise UsageError(
            f"{text}: {place!r} is not HOST:PORT; expected grpc://host:{DEFAULT_PORT},host2:{DEFAULT_PORT}"
        )
    return host, int(port)


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    with suppress(ValueError):
        return ipaddress.ip_address(host)
    return None


def _resolve(host: str, port: int) -> list[Server]:
    """Returns the servers of a host name; none if it cannot be looked up."""
    if (address := _ip(host)) is not None:
        return [Server(str(address), port)]
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # UnicodeError: no name can be like this
        return []
    addresses = sorted({str(each[4][0]) for each in found})  # all clients have the same order
    if host == "localhost" or len(addresses) == 1:
        return [Server(host, port)]
    return [Server(address, port, host) for address in addresses]
