"""The server: GET only, its own hosts only, this dataset only. Asked over real connections."""

from __future__ import annotations

import asyncio
import io
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from tests.inspect.raw import RawSample
from tests.inspect.serving import Client, serving
from tests.verify.rewriting import rewrite_sample
from vlmdata.errors import UsageError
from vlmdata.inspect import connections
from vlmdata.inspect.server import Guard, _ours


@pytest.fixture(scope="module")
def client(demo: Path) -> Iterator[Client]:
    with serving(demo) as found:
        yield found


def test_the_page_comes_with_a_policy(client: Client) -> None:
    answer = client.ask("/")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    for name, value in (("x-content-type-options", "nosniff"), ("cross-origin-resource-policy", "same-origin")):
        assert answer.headers[name] == value
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("path", ["/api/samples/{}", "/api/samples/0/images/{}", "/api/samples?start={}"])
def test_a_number_of_thousands_of_digits_is_none(client: Client, path: str) -> None:
    assert client.ask(path.format("1" * 5000)).status in (400, 404)


def test_half_a_request_does_not_stay(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_SECONDS_OF_A_REQUEST", 0.2)
    sent = b"GET / HTTP/1.1\r\nHost: x"
    half = [socket.create_connection(("127.0.0.1", client.port), timeout=60) for _ in range(20)]
    for number, each in enumerate(half):
        each.sendall(sent[: number + 1] if number % 2 else b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + sent)
    for each in half:
        with each, suppress(ConnectionError):
            while each.recv(65_536):  # until the server ends it
                pass
    assert client.ask("/").status == 200


def test_a_thumbnail_is_the_first_image_made_small(client: Client, demo_raw: list[RawSample]) -> None:
    answer = client.ask("/api/samples/2/thumbnail")
    assert (answer.status, answer.headers["content-type"]) == (200, "image/webp")
    small = Image.open(io.BytesIO(answer.body))
    _, high, wide = demo_raw[2].grids[0].tolist()
    assert max(small.size) == 96
    assert small.width / small.height == pytest.approx(wide / high, rel=0.05)
    assert client.ask("/api/samples/99/thumbnail").status == 404


def test_a_sample_without_images_has_no_thumbnail(mixed: Path) -> None:
    with serving(mixed) as client:
        rows = client.ask("/api/samples").json()["rows"]
        for row in rows:
            assert client.ask(f"/api/samples/{row['index']}/thumbnail").status == (200 if row["images"] else 404)
        assert [row["text"] for row in rows][:2] == ["Noise, nothing more.<|im_end|>", "Four.<|im_end|>"]


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "GETT"])
def test_only_get_is_answered(client: Client, method: str) -> None:
    for path in ("/", "/api/samples", "/api/samples/0"):
        answer = client.ask(path, method=method)
        assert (answer.status, answer.headers["allow"]) == (405, "GET")


OTHERS = ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:80", "localhost:1", "", "192.168.1.5:{port}"]
OTHERS += ["127.0.0.1:{port}.evil.example", "127.0.0.1:{port}@evil.example", "localhost:{port} evil"]


@pytest.mark.parametrize("host", OTHERS)
def test_other_hosts_are_refused(client: Client, host: str) -> None:
    answer = client.ask("/api/samples", hosts=[host.format(port=client.port)])
    assert answer.status == 421
    assert "rows" not in answer.text


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST", "[::1]"])
def test_own_names_are_answered(client: Client, host: str) -> None:
    assert client.ask("/api/samples", hosts=[f"{host}:{client.port}"]).status == 200


def test_no_host_or_two_are_refused(client: Client) -> None:
    own = f"127.0.0.1:{client.port}"
    for hosts in ([], [own, "evil.example"], [own, own]):
        assert client.ask("/", hosts=hosts).status in (400, 421)


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "https://127.0.0.1:{port}"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"},
    ],
)
def test_other_sites_are_refused(client: Client, headers: dict[str, str]) -> None:
    sent = {name: value.format(port=client.port) for name, value in headers.items()}
    assert client.ask("/api/samples/0", headers=sent).status == 403


def test_a_link_from_elsewhere_may_open_the_page(client: Client) -> None:
    assert client.ask("/", headers={"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}).status == 200
    assert client.ask("/", headers={"origin": client.home}).status == 200


def test_on_all_interfaces_addresses_are_answered_and_strange_names_are_not(demo: Path) -> None:
    with serving(demo, host="0.0.0.0", check=0, names=["box.lan"]) as client:
        for host in ("192.168.1.5", "[fe80::1]", "box.lan", "localhost"):
            assert client.ask("/", hosts=[f"{host}:{client.port}"]).status == 200
            assert client.ask("/", hosts=[f"{host}:1"]).status == 421
        for host in ("evil.example", "192.168.1.5.evil.example", "0x7f.1"):
            assert client.ask("/", hosts=[f"{host}:{client.port}"]).status == 421


def answers(port: int, host: str, *names: str) -> Callable[..., int]:
    """The guard of a server at a port that a test may not have; gives the status for a host and an origin."""
    hosts, origins = _ours(host, port, names)
    app = Starlette(routes=[Route("/", lambda _: Response("fine"))])
    guarded = Guard(app, hosts, origins, any_address=host == "0.0.0.0", port=port)

    async def ask(headers: list[tuple[bytes, bytes]]) -> int:
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": headers}
        await guarded(scope, receive, send)
        return int(sent[0]["status"])

    def status(host: str, origin: str | None = None) -> int:
        headers = [(b"host", host.encode())] + ([(b"origin", origin.encode())] if origin is not None else [])
        return asyncio.run(ask(headers))

    return status


def test_browsers_leave_out_port_80() -> None:
    status = answers(80, "127.0.0.1")
    for host in ("localhost", "127.0.0.1", "[::1]", "localhost:80"):
        assert status(host) == 200
        assert status(host, f"http://{host}") == 200
        assert status(host, f"https://{host}") == 403
    for host in ("evil.example", "localhost:443", "localhost.evil.example", "10.0.0.7", ":80", "[::2]"):
        assert status(host) == 421
        assert status("localhost", f"http://{host}") == 403
    everywhere = answers(80, "0.0.0.0")
    for host in ("10.0.0.7", "10.0.0.7:80", "[fe80::1]", "[fe80::1]:80"):
        assert everywhere(host, f"http://{host}") == 200
    for host in ("10.0.0.7:8765", "evil.example", "10.0.0.7:00080x"):
        assert everywhere(host) == 421
    assert answers(443, "127.0.0.1")("localhost") == 421  # HTTP at port 443: browsers name the port


def test_a_proxy_has_the_usual_ports() -> None:
    status = answers(8765, "127.0.0.1", "Data.Example.com", "other.example:8443", "fe80::7")
    for host in ("data.example.com", "data.example.com:8765", "DATA.example.com:443", "data.example.com:80"):
        assert status(host, "https://data.example.com") == 200
        assert status(host, "http://data.example.com") == 200
    assert status("[fe80::7]") == 200
    assert status("other.example:8443", "https://other.example:8443") == 200
    for host in ("other.example", "data.example.com:8443", "localhost", "evil.data.example.com"):
        assert status(host) == 421
    for origin in ("https://other.example", "https://localhost:8765", "null", "https://evil.example"):
        assert status("data.example.com", origin) == 403


@pytest.mark.parametrize("name", ["https://data.example.com", "", "data.example.com/"])
def test_a_url_is_no_name(name: str) -> None:
    with pytest.raises(UsageError, match=f"--allow-host {name}: give a host name, such as data.example.com"):
        _ours("127.0.0.1", 8765, [name])


ELSEWHERE = ["/../manifest.json", "/manifest.json", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/shard-000000.tar"]
ELSEWHERE += [
    "/api/samples/../../manifest.json",
    "/api/samples/..%2f..%2fmanifest.json",
    "/api/samples/%2fetc%2fpasswd",
]
ELSEWHERE += ["/api/samples/0/images/..%2f0", "/api/samples/-1", "/api/samples/1e3", "/api/samples/99", "/static/x.css"]
ELSEWHERE += ["/api/samples/0/images/1", "/api/samples/99999999999999999999999", "/openapi.json", "/api/samples/%00"]


@pytest.mark.parametrize("path", ELSEWHERE)
def test_there_is_nothing_else(client: Client, path: str) -> None:
    answer = client.ask(path)
    assert answer.status == 404
    assert "root:" not in answer.text
    assert "fingerprint" not in answer.text


def test_only_the_dataset_is_read(client: Client, demo: Path) -> None:
    opened: list[str] = []
    watching = True

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event == "open" and isinstance(arguments[0], str | bytes):
            opened.append(os.fsdecode(arguments[0]))

    sys.addaudithook(hook)  # it cannot be taken away again: the flag ends it
    try:
        for path in ("/", "/api/samples?query=describe", "/api/samples/3/images/0", "/api/packs", *ELSEWHERE):
            client.ask(path)
    finally:
        watching = False
    outside = [path for path in opened if not path.startswith(str(demo))]
    # Python may import modules late; nothing else of the machine is touched.
    assert [path for path in outside if not path.endswith((".py", ".pyc", ".so"))] == []
    assert any(path.startswith(str(demo)) for path in opened)


WRONG = ["start=-1", "start=1.5", "start=9999999999999999", "start=%D9%A3", "sort=odd", "query=is:odd"]


@pytest.mark.parametrize("question", WRONG)
def test_invalid_requests_are_refused(client: Client, question: str) -> None:
    answer = client.ask(f"/api/samples?{question}")
    assert answer.status == 400
    assert answer.json()["error"]


def test_lists_go_on_where_they_stopped(client: Client, demo_raw: list[RawSample]) -> None:
    answer = client.ask("/api/samples?sort=longest").json()
    assert [row["length"] for row in answer["rows"]] == sorted((s.length for s in demo_raw), reverse=True)
    assert (answer["done"], answer["candidates"]) == (True, len(demo_raw))
    rest = client.ask(f"/api/samples?sort=longest&start={len(demo_raw) - 2}").json()["rows"]
    assert rest == answer["rows"][-2:]


def test_samples_and_pictures_are_exact(client: Client, demo_raw: list[RawSample]) -> None:
    for i, raw in enumerate(demo_raw[:3]):
        assert client.ask(f"/api/samples/{i}").json()["tokens"]["id"] == raw.ids.tolist()
        image = client.ask(f"/api/samples/{i}/images/0")
        assert image.headers["content-type"] == "image/png"
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(image.body))), raw.picture(0))


def test_packs_go_on_where_they_stopped(client: Client) -> None:
    answer = client.ask("/api/packs").json()
    assert len(answer["batches"]) == answer["total"]
    assert client.ask(f"/api/packs?start={answer['total'] - 1}").json()["batches"] == answer["batches"][-1:]
    assert client.ask("/api/packs?start=500").json()["batches"] == []


def test_what_only_tokens_tell_is_suspicious_too(demo: Path, copy_of: Callable[[Path], Path]) -> None:
    copy = copy_of(demo)
    rewrite_sample(copy, "000000004", lambda draft: draft.loss_mask.__setitem__(np.argmax(draft.loss_mask), 0))
    with serving(copy) as client:
        rows = client.ask("/api/samples?query=is:suspicious").json()["rows"]
        assert [row["key"] for row in rows] == ["000000004"]
        assert "late_target" in [found["kind"] for found in rows[0]["findings"]]


def test_a_lost_shard_is_a_message(demo: Path, copy_of: Callable[[Path], Path]) -> None:
    copy = copy_of(demo)
    (copy / "shard-000002.tar").unlink()
    with serving(copy, check=0) as client:
        for path in ("/api/samples/7", "/api/samples/7/images/0", "/api/samples?query=describe", "/api/packs"):
            answer = client.ask(path)
            assert answer.status == 500
            assert "shard-000002.tar" in answer.json()["error"]
        assert client.ask("/api/samples/0").status == 200
