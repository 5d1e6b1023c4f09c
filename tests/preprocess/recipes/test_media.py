"""Files named by data: paths stay below the image root, URLs are fetched only where allowed and within limits."""

from __future__ import annotations

import os
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vlmdata.preprocess.recipes import web_images
from vlmdata.preprocess.recipes.file_kinds import IMAGES, VIDEOS, FileKind
from vlmdata.preprocess.recipes.media import MediaLoader, file_names
from vlmdata.preprocess.reject import RowRejected
from vlmdata.reasons import Reason

SECRET = b"secret"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """``tmp_path/pictures`` with a.png and sub/b.png; outside it lies ``secret.png``."""
    folder = tmp_path / "pictures"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.png").write_bytes(b"a")
    (folder / "sub" / "b.png").write_bytes(b"b")
    (tmp_path / "secret.png").write_bytes(SECRET)
    (tmp_path / "pictures-twin").mkdir()
    (tmp_path / "pictures-twin" / "secret.png").write_bytes(SECRET)
    return folder


def loader(*private_hosts: str) -> MediaLoader:
    """A loader of URLs that may ask the loopback by its number."""
    return MediaLoader(None, True, private_hosts or ("127.0.0.1",))


def rejection(loader: MediaLoader, value: Any, kind: FileKind = IMAGES) -> RowRejected:
    with pytest.raises(RowRejected) as rejected:
        loader.load(value, "images[3]", kind)
    assert rejected.value.message.startswith("images[3]: ")
    return rejected.value


class TestPaths:
    @pytest.mark.parametrize("path", ["a.png", "./a.png", "sub/../a.png", "sub/./../sub/../a.png", "link.png"])
    def test_below_the_root(self, root, path):
        (root / "link.png").symlink_to(root / "a.png")
        assert MediaLoader(str(root), False).load(path, "image") == b"a"

    def test_absolute_below_the_root(self, root):
        assert MediaLoader(str(root), False).load(str(root / "sub" / "b.png"), "image") == b"b"

    def test_the_root_itself_may_be_a_link(self, root, tmp_path):
        (tmp_path / "alias").symlink_to(root)
        loader = MediaLoader(str(tmp_path / "alias"), False)
        assert loader.load("a.png", "image") == b"a"
        assert loader.load(str(tmp_path / "alias" / "a.png"), "image") == b"a"

    @pytest.mark.parametrize(
        "path",
        [
            "../secret.png",
            "sub/../../secret.png",
            "{tmp}/secret.png",
            "{tmp}/pictures/../secret.png",
            "{tmp}/pictures-twin/secret.png",
            "../pictures-twin/secret.png",
            "file://{tmp}/secret.png",
            "file:///../../../../../../../../../../../..{tmp}/secret.png",
            "file://{tmp}/pictures/%2e%2e/secret.png",
            "link.png",
            "folder-link/secret.png",
            "chain.png",
            "..",
            "/etc/passwd",
        ],
    )
    def test_out_of_the_root_is_refused_and_never_read(self, root, tmp_path, path, monkeypatch):
        (root / "link.png").symlink_to(tmp_path / "secret.png")
        (root / "folder-link").symlink_to(tmp_path)
        (root / "chain.png").symlink_to(root / "link.png")
        monkeypatch.setattr(Path, "read_bytes", lambda self: pytest.fail(f"{self} was read"))
        found = rejection(MediaLoader(str(root), False), path.format(tmp=tmp_path))
        assert found.reason is Reason.IMAGE_PATH
        assert found.message.endswith(" is outside the image root")

    STEPS = ("..", ".", "sub", "a.png", "secret.png", "folder-link", "", "pictures")

    @settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(steps=st.lists(st.sampled_from(STEPS), max_size=7))
    def test_no_path_whatever_gives_what_lies_outside(self, root, tmp_path, steps):
        if not (root / "folder-link").exists():
            (root / "folder-link").symlink_to(tmp_path)
        with suppress(RowRejected):
            assert MediaLoader(str(root), False).load("/".join(["sub", *steps]), "image") in (b"a", b"b")

    @pytest.mark.parametrize(
        "path", ["missing.png", "sub", ".", "a.png/x", "loop.png", "null\0byte.png", "x" * 5000, "pipe", "\ud800.png"]
    )
    def test_what_is_no_file_is_a_missing_image(self, root, path):
        (root / "loop.png").symlink_to(root / "loop.png")
        os.mkfifo(root / "pipe")
        assert rejection(MediaLoader(str(root), False), path).reason is Reason.MISSING_IMAGE

    @pytest.mark.parametrize("kind", [IMAGES, VIDEOS])
    def test_a_file_over_the_limit_is_not_read(self, root, kind):
        (root / "big.png").write_bytes(b"1234")
        found = rejection(MediaLoader(str(root), False), "big.png", replace(kind, most_bytes=3))
        assert found.reason is kind.too_large
        assert found.message.startswith("images[3]: big.png has 4 bytes, over 3; ")

    def test_without_a_root_every_path_is_refused_with_the_remedy(self, root):
        found = rejection(MediaLoader(None, False), str(root / "a.png"))
        assert found.reason is Reason.IMAGE_PATH
        assert "--image-root" in found.message


class TestDataUris:
    @pytest.mark.parametrize(
        "uri", ["data:image/png;base64,YQ==", "data:;base64,YQ==", "data:image/png;base64,Y Q\n=="]
    )
    def test_base64(self, uri):
        assert MediaLoader(None, False).load(uri, "image") == b"a"

    @pytest.mark.parametrize(
        "uri",
        ["data:image/png,YQ==", "data:image/png;base64", "data:image/png;base64,Y*==", "data:;base64,YQ", "data:"],
    )
    def test_anything_else_is_not_an_image(self, uri):
        assert rejection(MediaLoader(None, False), uri).reason is Reason.NOT_AN_IMAGE

    def test_messages_do_not_repeat_the_whole_uri(self):
        assert len(rejection(MediaLoader(None, False), "data:image/png;base64,*" + "A" * 10_000).message) < 300


@pytest.mark.parametrize("value", [None, "", "  ", 7, [], {}, {"bytes": None, "path": None}, {"path": ""}])
def test_nothing_is_a_missing_image(value):
    assert rejection(loader(), value).reason is Reason.MISSING_IMAGE


class Site(ThreadingHTTPServer):
    """A site on the loopback that counts its visits."""

    def __init__(self) -> None:
        self.visits: Counter[str] = Counter()
        self.over = threading.Event()
        super().__init__(("127.0.0.1", 0), Page)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}{path}"


class Page(BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        self.server.visits[self.path] += 1
        visit = self.server.visits[self.path]
        if self.path == "/a.png" or (self.path == "/flaky.png" and visit == 3):
            self.reply(200, b"image")
        elif self.path == "/moved.png":
            self.send_response(302)
            self.send_header("Location", "/a.png")
            self.end_headers()
        elif self.path == "/to-file":
            self.send_response(302)
            self.send_header("Location", "file:///etc/passwd")
            self.end_headers()
        elif self.path.startswith("/to?"):
            self.send_response(302)
            self.send_header("Location", self.path.partition("?")[2])
            self.end_headers()
        elif self.path == "/drip.png":
            self.send_response(200)
            self.end_headers()
            self.drip(b"x")
        elif self.path == "/drip-headers.png":
            self.send_response_only(200)
            self.flush_headers()
            self.drip(b"X")
        elif self.path == "/cut.png":
            self.reply(200, b"ima", promised=5)
        elif self.path == "/endless.png":
            self.send_response(200)
            self.end_headers()
            self.pour()
        else:
            self.reply(404 if self.path == "/missing.png" else 503, b"")

    def reply(self, status: int, body: bytes, promised: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if promised is None else promised))
        self.end_headers()
        self.wfile.write(body)

    def pour(self) -> None:
        try:
            while True:
                self.wfile.write(bytes(1 << 16))
        except OSError:
            pass

    def drip(self, byte: bytes) -> None:
        with suppress(OSError):
            while not self.server.over.wait(0.02):
                self.wfile.write(byte)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def site(monkeypatch) -> Iterator[Site]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = Site()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.over.set()
    server.shutdown()
    server.server_close()


class TestFilesAhead:
    """Which files are fetched before they are asked for."""

    def test_videos_are_few(self):
        row = {"images": [f"{n}.png" for n in range(99)], "videos": [f"{n}.mp4" for n in range(9)]}
        kinds = Counter(kind.name for kind, _ in file_names(row))
        assert kinds == {"image": 64, "video": 2}

    def test_what_a_name_stands_for(self):
        item = {"type": "video", "video": "http://example.org/a.gif?x=1"}
        row = {"messages": [{"content": [item, {"video": ["f0.jpg", "f1.jpg"]}]}], "images": ["b.gif"], "id": "c.mkv"}
        found = [(kind.name, name) for kind, name in file_names(row)]
        assert found == [
            ("video", "http://example.org/a.gif?x=1"),
            ("image", "f0.jpg"),
            ("image", "f1.jpg"),
            ("image", "b.gif"),
            ("video", "c.mkv"),
        ]

    def test_those_that_wait_are_counted_per_kind(self, site, root):
        media = loader()
        first = media.begin({"videos": [site.url("/a.mp4"), site.url("/b.mp4")]})
        assert len(first) == 2
        assert media.begin({"videos": [site.url("/c.mp4")]}) == []
        media.forget(first)
        assert len(media.begin({"videos": [site.url("/c.mp4")]})) == 1


class TestUrls:
    def test_are_not_fetched_unless_allowed(self, site, root):
        found = rejection(MediaLoader(str(root), False), site.url("/a.png"))
        assert found.reason is Reason.IMAGE_FETCH
        assert "--allow-urls" in found.message
        assert not site.visits

    def test_https_is_a_url_too(self):
        assert rejection(MediaLoader(None, False), "https://example.org/a.png").reason is Reason.IMAGE_FETCH

    @pytest.mark.parametrize("path", ["/a.png", "/moved.png"])
    def test_are_fetched_where_allowed(self, site, path):
        assert loader().load(site.url(path), "image") == b"image"

    def test_a_passing_failure_is_tried_again(self, site):
        assert loader().load(site.url("/flaky.png"), "image") == b"image"
        assert site.visits["/flaky.png"] == 3

    def test_not_found_is_not_tried_again(self, site):
        found = rejection(loader(), site.url("/missing.png"))
        assert found.reason is Reason.IMAGE_FETCH
        assert found.message.endswith("/missing.png: HTTP status 404")
        assert site.visits["/missing.png"] == 1

    def test_a_lasting_failure_is_given_up(self, site):
        found = rejection(loader(), site.url("/broken.png"))
        assert found.reason is Reason.IMAGE_FETCH
        assert "3 attempts failed, the last with: 503" in found.message
        assert site.visits["/broken.png"] == 3

    def test_half_an_image_is_no_image(self, site):
        assert rejection(loader(), site.url("/cut.png")).reason is Reason.IMAGE_FETCH

    def test_a_download_stops_at_the_limit(self, site):
        found = rejection(loader(), site.url("/endless.png"), replace(IMAGES, most_bytes=1 << 20))
        assert found.reason is Reason.IMAGE_TOO_LARGE
        assert "gives more than 1048576 bytes; " in found.message

    def test_connection_refused(self, monkeypatch):
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        found = rejection(loader(), f"http://127.0.0.1:{port}/a.png")
        assert found.reason is Reason.IMAGE_FETCH
        assert "3 attempts failed" in found.message

    @pytest.mark.parametrize("url", ["http://", "http://[::1", "https:///x.png", "http://127.0.0.1:99999/a.png"])
    def test_what_is_no_url(self, url):
        assert rejection(loader(), url).reason is Reason.IMAGE_FETCH

    def test_a_redirect_does_not_lead_to_a_local_file(self, site):
        assert rejection(loader(), site.url("/to-file")).reason is Reason.IMAGE_FETCH

    @pytest.mark.parametrize("path", ["/drip.png", "/drip-headers.png"])
    def test_a_server_that_never_ends_is_left_after_a_time(self, site, path, monkeypatch):
        monkeypatch.setattr(web_images, "_DEADLINE_SECONDS", 0.3)
        found = rejection(loader(), site.url(path))
        assert found.reason is Reason.IMAGE_FETCH
        assert found.message.endswith(f"{path}: the image did not arrive within 0.3 seconds")
        assert site.visits[path] == 1

    def test_other_schemes_are_paths_that_do_not_exist(self, root):
        assert rejection(MediaLoader(str(root), True), "ftp://example.org/a.png").reason is Reason.MISSING_IMAGE


class TestPrivateNetworks:
    """A row's address may lead to what only this machine reaches."""

    @pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "0.0.0.0", "[::ffff:127.0.0.1]"])
    def test_are_not_asked(self, site, host):
        url = site.url("/a.png").replace("127.0.0.1", host)
        found = rejection(loader("other.example"), url)
        assert found.reason is Reason.IMAGE_FETCH
        assert "which is not public; if it may be asked, give --allow-private-host" in found.message
        assert not site.visits

    def test_are_not_asked_by_a_redirect(self, site, monkeypatch):
        target = site.url("/a.png").replace("127.0.0.1", "localhost")
        found = rejection(loader(), site.url(f"/to?{target}"))
        assert "host localhost has the address" in found.message
        assert site.visits == {f"/to?{target}": 1}, "a refusal is not tried again"

    def test_are_not_asked_by_a_name_that_changes_its_address(self, site, monkeypatch):
        monkeypatch.setattr(web_images, "_addresses", lambda host, port: ["8.8.8.8"])
        found = rejection(loader("other.example"), site.url("/a.png"))
        assert "host 127.0.0.1 has the address 127.0.0.1" in found.message
        assert not site.visits

    @pytest.mark.parametrize("named", ["localhost", "LOCALHOST", "localhost:{port}"])
    def test_are_asked_if_the_user_named_the_host(self, site, named):
        port = site.server_address[1]
        url = site.url("/a.png").replace("127.0.0.1", "localhost")
        assert loader(named.format(port=port)).load(url, "image") == b"image"
        assert "not public" in rejection(loader("localhost:1"), url).message

    def test_are_asked_if_the_image_root_is_there(self, site):
        host = MediaLoader(site.url("/images"), True)
        assert host.load(site.url("/a.png"), "image") == b"image"
        assert "not public" in rejection(host, "http://localhost/a.png").message

    def test_are_not_asked_by_a_proxy(self, site, monkeypatch):
        """The proxy itself may be there. It alone knows some names."""
        for name in ("http_proxy", "HTTP_PROXY"):
            monkeypatch.setenv(name, site.url(""))
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.setenv(name, "")
        found = rejection(loader("other.example"), "http://169.254.169.254/a.png")
        assert "host 169.254.169.254 has the address 169.254.169.254" in found.message
        assert not site.visits
        monkeypatch.setattr(web_images, "_addresses", lambda host, port: [])
        rejection(loader("other.example"), "http://images.example/missing.png")
        assert site.visits == {"http://images.example/missing.png": 3}

    @pytest.mark.parametrize(
        ("address", "public"),
        [
            ("8.8.8.8", True), ("2606:4700::1111", True), ("::ffff:8.8.8.8", True), ("64:ff9b::808:808", True),
            ("10.0.0.1", False), ("172.16.0.1", False), ("192.168.1.1", False), ("127.8.8.8", False),
            ("169.254.169.254", False), ("100.64.0.1", False), ("0.0.0.0", False), ("224.0.0.1", False),
            ("255.255.255.255", False), ("198.18.0.1", False), ("::1", False), ("::", False), ("fe80::1%eth0", False),
            ("fd00:ec2::254", False), ("fec0::1", False), ("ff02::1", False), ("::ffff:10.0.0.1", False),
            ("2002:7f00:1::", False), ("64:ff9b::a00:1", False), ("::127.0.0.1", False),
        ],
    )  # fmt: skip
    def test_are_known_by_their_addresses(self, address, public):
        assert web_images.is_public(address) is public
