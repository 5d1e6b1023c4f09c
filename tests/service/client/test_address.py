"""Addresses of services."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from vlmdata.errors import UsageError
from vlmdata.loader.config import Service
from vlmdata.service.address import Server, is_loopback, is_service, parse_address
from vlmdata.service.client.connection import authorization


@pytest.mark.parametrize(
    ("text", "hosts", "tls", "dataset"),
    [
        ("grpc://a", (("a", 8815),), False, ""),
        ("grpc://a:1,b:2", (("a", 1), ("b", 2)), False, ""),
        ("grpc+tls://a:1/cord/", (("a", 1),), True, "cord"),
        ("GRPC://[::1]:7,[fe80::1]", (("::1", 7), ("fe80::1", 8815)), False, ""),
    ],
)
def test_are_parsed(text: str, hosts: tuple[tuple[str, int], ...], tls: bool, dataset: str) -> None:
    address = parse_address(text)
    assert (address.hosts, address.tls, address.dataset) == (hosts, tls, dataset)
    assert is_service(text)


@pytest.mark.parametrize("text", ["grpc://", "grpc://a:x", "grpc://a:0", "grpc://a,", "grpc://a:70000"])
def test_malformed_ones_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not HOST:PORT; expected grpc://host:8815,host2:8815"):
        parse_address(text)


def test_other_places_are_no_services() -> None:
    assert not any(map(is_service, ["data/grpc", "s3://grpc", "/grpc://a", "http://a:8815"]))


def test_a_name_with_several_addresses_is_several_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(host: str, port: int, **_: Any) -> list[Any]:
        if host == "gone":
            raise socket.gaierror
        return [(0, 0, 0, "", (address, port)) for address in ("10.0.0.2", "10.0.0.1", "10.0.0.2")]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    address = parse_address("grpc+tls://data.internal:1,gone:2,10.9.9.9:3")
    assert address.servers() == (
        Server("10.0.0.1", 1, "data.internal"),
        Server("10.0.0.2", 1, "data.internal"),
        Server("gone", 2),
        Server("10.9.9.9", 3),
    )
    assert str(Server("fe80::1", 7)) == "[fe80::1]:7"


def test_loopback() -> None:
    assert all(map(is_loopback, ["localhost", "127.0.0.1", "127.9.9.9", "::1"]))
    assert not any(map(is_loopback, ["0.0.0.0", "10.0.0.1", "localhost.evil.example", ""]))


class TestTokens:
    @pytest.fixture
    def token(self, tmp_path: Any) -> Any:
        path = tmp_path / "token"
        path.write_text("secret\n")
        return path

    def test_go_in_a_header(self, token: Any) -> None:
        for place in ("grpc://127.0.0.1", "grpc+tls://data.internal"):
            assert authorization(parse_address(place), Service(service_token_file=token)) == [
                (b"authorization", b"Bearer secret")
            ]
        assert authorization(parse_address("grpc://data.internal"), Service()) == []

    def test_do_not_cross_a_network_in_clear_text(self, token: Any) -> None:
        address = parse_address("grpc://localhost,data.internal")
        with pytest.raises(UsageError, match=r"clear text over the network. Use grpc\+tls://"):
            authorization(address, Service(service_token_file=token))
        assert authorization(address, Service(service_token_file=token, service_insecure=True))

    @pytest.mark.parametrize("given", ["5ecr3t", "5ecr3t" * 100, "5ecr3t\0"])
    def test_given_for_the_path_are_not_shown(self, given: str) -> None:
        with pytest.raises(UsageError, match="Give the path of a file that holds the token, not the token") as raised:
            authorization(parse_address("grpc://localhost"), Service(service_token_file=given))
        assert "5ecr3t" not in str(raised.value)

    @pytest.mark.parametrize(("text", "found"), [("5ecr3t\n\n5ecr3t\n", "2 lines"), ("\n", "0 lines")])
    def test_must_be_alone_in_their_file(self, tmp_path: Any, text: str, found: str) -> None:
        (tmp_path / "file").write_text(text)
        with pytest.raises(UsageError, match=f"the file has {found}; it must hold one token, on one line") as raised:
            authorization(parse_address("grpc://localhost"), Service(service_token_file=tmp_path / "file"))
        assert "5ecr3t" not in str(raised.value)


def test_options_that_contradict_are_refused() -> None:
    with pytest.raises(UsageError, match="tls_cert and tls_key: give both"):
        Service(tls_cert="a")
    with pytest.raises(UsageError, match="hedge is 0"):
        Service(hedge=0)
