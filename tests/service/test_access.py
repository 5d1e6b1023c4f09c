"""Who may ask: tokens, certificates, rates, and what a server refuses to be."""

from __future__ import annotations

import datetime
import logging
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trustme

from vlmdata import StreamingLoader
from vlmdata.errors import ResourceError, UsageError
from vlmdata.service.address import Server
from vlmdata.service.client.connection import CertificateError, ServerLostError, lost, more_telling
from vlmdata.service.server import access
from vlmdata.service.server.access import RateLimit, TokenFile, machine_of
from vlmdata.service.server.config import ServerConfig
from vlmdata.service.server.metrics import Counting
from vlmdata.service.server.server import CollationServer

OPTIONS: dict[str, Any] = {"capacity": 1024, "global_batch": 2}


@contextmanager
def serving(data: Path, **options: Any) -> Iterator[int]:
    """A server in this process; gives its port."""
    server = CollationServer([data], ServerConfig(port=0, workers=1, drain=1.0, **options))
    try:
        yield server.port
    finally:
        server.close()


def first_batch(place: str, **options: Any) -> Any:
    with StreamingLoader(place, **OPTIONS | options) as loader:
        return next(iter(loader))


def without_answer(place: str, **options: Any) -> None:
    """Asserts that no server answers. Only this is worth a short wait: what is served may take long to come."""
    with pytest.raises(ResourceError, match="no server answered within 2 s"):
        first_batch(place, timeout=2.0, **options)


def refused(message: str, place: str, **options: Any) -> None:
    """Asserts that the loader is refused at once: with this patience, the test would not end otherwise."""
    with pytest.raises(UsageError, match=message):
        first_batch(place, timeout=1e6, **options)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tuple[trustme.CA, Path]:
    ca = trustme.CA()
    path = tmp_path_factory.mktemp("ca") / "ca.pem"
    ca.cert_pem.write_to_path(str(path))
    return ca, path


def certificate(ca: trustme.CA, folder: Path, name: str, **options: Any) -> tuple[Path, Path]:
    issued = ca.issue_cert(name, **options)
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    issued.cert_chain_pems[0].write_to_path(str(cert))
    issued.private_key_pem.write_to_path(str(key))
    return cert, key


class TestTokens:
    def test_a_valid_token_is_needed_and_can_be_rotated(self, chat: Path, tmp_path: Path) -> None:
        tokens, mine = tmp_path / "tokens", tmp_path / "mine"
        tokens.write_text("# first\nold\n\nsecond\n")
        mine.write_text("old\n")
        with serving(chat, token_file=tokens) as port:
            place = f"grpc://127.0.0.1:{port}"
            assert first_batch(place, service_token_file=mine)
            kept = StreamingLoader(place, service_token_file=mine, **OPTIONS | {"timeout": 60.0})
            batches = iter(kept)
            next(batches)
            for given in ("wrong", "ol", "# first"):
                mine.write_text(given)
                with pytest.raises(UsageError, match="the token was refused"):
                    first_batch(place, service_token_file=mine)
            with pytest.raises(UsageError, match=r"wants a token\. Give a file that holds one: service_token_file"):
                first_batch(place)
            tokens.write_text("new\n")
            os.utime(tokens, ns=(1, 1))
            mine.write_text("new")
            deadline = datetime.datetime.now() + datetime.timedelta(seconds=60)
            while True:
                try:
                    first_batch(place, service_token_file=mine)
                    break
                except UsageError:
                    assert datetime.datetime.now() < deadline, "the file is not read again"
            assert next(batches)  # a loader that is open reads its token again, too
            kept.close()
            mine.write_text("old")
            with pytest.raises(UsageError, match="the token was refused"):
                first_batch(place, service_token_file=mine)

    def test_a_loader_outlives_a_rotation_of_both_files(
        self, chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The server's file is empty for a while; then the loader's old token is refused until its file has the new."""
        monkeypatch.setattr(access, "_SECONDS_BETWEEN_LOOKS", 0.0)
        caplog.set_level(logging.INFO, "vlmdata.service")
        tokens, mine, refused = tmp_path / "tokens", tmp_path / "mine", list[str]()
        tokens.write_text("old")
        mine.write_text("old")

        def count(_: object, reason: str) -> None:
            refused.append(reason)
            if len(refused) == 3:
                mine.write_text("new")

        monkeypatch.setattr(Counting, "refused", count)
        server = CollationServer([chat], ServerConfig(port=0, workers=1, drain=1.0, token_file=tokens))
        with closing(server):
            options = OPTIONS | {"service_token_file": mine, "timeout": 240.0}
            with StreamingLoader(f"grpc://127.0.0.1:{server.port}", **options) as loader:
                batches = iter(loader)
                tokens.write_text("")
                assert next(batches)
                assert "token file has no token; the earlier tokens stay valid" in caplog.messages
                tokens.write_text("new")
                assert len(list(batches)) > 1
        assert len(refused) >= 3
        assert set(refused) == {"token"}
        assert caplog.messages.count("token refused") == len(refused)
        assert any("the token was refused" in each and each.endswith("Asking it again.") for each in caplog.messages)

    def test_a_file_without_tokens_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="cannot be read: No such file"):
            TokenFile(tmp_path / "none")
        (tmp_path / "empty").write_text("# nothing\n")
        with pytest.raises(UsageError, match="has no token; write one on each line"):
            TokenFile(tmp_path / "empty")


class TestTls:
    def test_clients_check_the_server(self, chat: Path, tmp_path: Path, authority: tuple[trustme.CA, Path]) -> None:
        ca, ca_file = authority
        cert, key = certificate(ca, tmp_path, "localhost")
        with serving(chat, tls_cert=cert, tls_key=key) as port:
            assert first_batch(f"grpc+tls://localhost:{port}", tls_ca=ca_file)
            stranger = tmp_path / "stranger.pem"
            trustme.CA().cert_pem.write_to_path(str(stranger))
            refused(
                r"certificate verify failed.* \(give the authority", f"grpc+tls://localhost:{port}", tls_ca=stranger
            )

    def test_an_expired_certificate_is_no_certificate(
        self, chat: Path, tmp_path: Path, authority: tuple[trustme.CA, Path]
    ) -> None:
        ca, ca_file = authority
        past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
        cert, key = certificate(ca, tmp_path, "localhost", not_after=past)
        with serving(chat, tls_cert=cert, tls_key=key) as port:
            refused("certificate has expired", f"grpc+tls://localhost:{port}", tls_ca=ca_file)

    def test_wrong_certificates_end_in_one_message(
        self,
        chat: Path,
        tmp_path: Path,
        authority: tuple[trustme.CA, Path],
        capfd: pytest.CaptureFixture[str],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Of a server by another name, and of one without a certificate. Neither gRPC nor the loader log more."""
        ca, ca_file = authority
        cert, key = certificate(ca, tmp_path, "elsewhere.example")
        with serving(chat, tls_cert=cert, tls_key=key) as port:
            refused("name the server as its certificate does", f"grpc+tls://127.0.0.1:{port}", tls_ca=ca_file)
        with serving(chat) as port:
            refused("use grpc:// instead", f"grpc+tls://127.0.0.1:{port}", tls_ca=ca_file)
        assert (capfd.readouterr().err, caplog.messages) == ("", [])

    def test_servers_check_the_clients(self, chat: Path, tmp_path: Path, authority: tuple[trustme.CA, Path]) -> None:
        ca, ca_file = authority
        cert, key = certificate(ca, tmp_path, "localhost")
        mine, my_key = certificate(ca, tmp_path, "trainer")
        with serving(chat, tls_cert=cert, tls_key=key, tls_client_ca=ca_file) as port:
            place = f"grpc+tls://localhost:{port}"
            assert first_batch(place, tls_ca=ca_file, tls_cert=mine, tls_key=my_key)
            without_answer(place, tls_ca=ca_file)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host": "0.0.0.0"}, "batches would cross the network in clear text. Give --tls-cert"),
        ({"host": "10.0.0.7", "token_file": Path("t")}, "batches and tokens would cross the network in clear text"),
        ({"host": "0.0.0.0", "tls_cert": Path("c"), "tls_key": Path("k")}, "anyone on the network could read the data"),
        ({"tls_cert": Path("c")}, "--tls-cert and --tls-key: give both"),
        ({"tls_client_ca": Path("c")}, "--tls-client-ca needs --tls-cert"),
        ({"memory": 0}, "memory is 0"),
        ({"verify": "twice"}, "--verify twice: must be one of stored, pixels, off"),
        ({"port": 70_000}, "port is 70000"),
    ],
)
def test_an_exposed_server_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ServerConfig(**options)


@pytest.mark.parametrize(
    ("cause", "remedy"),
    [
        (
            "failed to connect to all addresses; SSL routines::wrong version number",
            "use grpc:// instead of grpc+tls://",
        ),
        ("failed to connect to all addresses; SSL routines::certificate verify failed", "(tls_ca)"),
        ("failed to connect to all addresses; Peer name b is not in peer certificate", "as its certificate does"),
        ("failed to connect to all addresses; Expected SETTINGS frame as the first", "that of --metrics-port"),
        ("failed to connect to all addresses; Socket closed", "Then use grpc+tls://"),
        ("Socket closed", ""),
        ("failed to connect to all addresses; Connection refused", ""),
    ],
)
def test_what_grpc_says_has_a_remedy(cause: str, remedy: str) -> None:
    said = (
        f"Flight returned unavailable error, with message: {cause}. gRPC client debug context: x. Detail: Unavailable"
    )
    error = lost(Server("a", 1), RuntimeError(said))
    assert str(error).startswith(f"server a:1: {cause}")
    assert isinstance(error, CertificateError) == ("SSL" in cause or "certificate" in cause)
    assert "Detail" not in str(error)
    assert remedy in str(error)
    assert error.has_remedy == bool(remedy)
    later = ServerLostError("Connection refused")
    assert more_telling(error, later) is (error if remedy else later)
    assert more_telling(error, UsageError("no")) is not error
    assert more_telling(later, error) is error


def test_an_exposed_server_can_be_insisted_on() -> None:
    assert ServerConfig(host="0.0.0.0", insecure=True).host == "0.0.0.0"
    secured = ServerConfig(host="0.0.0.0", tls_cert=Path("c"), tls_key=Path("k"), token_file=Path("t"))
    assert secured.tls


def test_a_port_that_is_taken_is_named(chat: Path) -> None:
    with serving(chat) as port, pytest.raises(UsageError, match=f"127.0.0.1:{port}: cannot listen"):
        CollationServer([chat], ServerConfig(port=port, workers=1))


def test_rates_are_limited_for_each_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("vlmdata.service.server.access.time", SimpleNamespace(monotonic=lambda: now))
    limit = RateLimit(5.0)  # a bucket of ten
    assert sum(limit.allows("a") for _ in range(100)) == 10
    assert limit.allows("b")
    now += 1.0
    assert sum(limit.allows("a") for _ in range(100)) == 5
    assert machine_of("ipv4:10.0.0.7:41234") == "ipv4:10.0.0.7"
    assert machine_of("ipv6:[::1]:41234") == "ipv6:[::1]"
    assert machine_of("ipv6:%5B::1%5D:41234") == "ipv6:[::1]"  # as gRPC has it
    assert machine_of("ipv6:%5Bfe80::1%25eth0%5D:41234") == "ipv6:[fe80::1%eth0]"
