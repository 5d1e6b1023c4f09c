"""Sources on web servers: rows of one version only, whatever the server tells of versions."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vlmdata import attempts
from vlmdata.errors import SourceError
from vlmdata.preprocess.sources import counting, web_object
from vlmdata.preprocess.sources.open import open_source
from vlmdata.preprocess.sources.rows import Source

OLD = "Mon, 01 Jan 2024 00:00:00 GMT"
NEW = "Mon, 01 Jan 2024 00:00:01 GMT"


def lines(version: int, count: int = 60) -> bytes:
    return b"".join(json.dumps({"version": version, "n": 1000 + n}).encode() + b"\n" for n in range(count))


@dataclass
class Served:
    """What a server has at every path: some version of an object, and headers of that version."""

    versions: list[tuple[bytes, dict[str, str]]]
    version: Callable[[int], int] = lambda request: 0
    ranges: bool = True
    url: str = ""
    requests: list[str] = field(default_factory=list)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(attempts, "PAUSES", (0.01,))
    monkeypatch.setattr(counting, "_RANGE_BYTES", 1 << 10)
    monkeypatch.setattr(counting, "_BLOCK_BYTES", 1 << 7)
    monkeypatch.setattr(web_object, "_BLOCK_BYTES", 1 << 8)
    state, lock = Served([]), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # headers and body in one packet

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, body: bool) -> None:
            with lock:
                data, headers = state.versions[state.version(len(state.requests))]
                state.requests.append(f"{self.command} {self.headers.get('Range', '')}".strip())
            wanted = self.headers.get("Range") if state.ranges else None
            start, stop = 0, len(data)
            if wanted is not None:
                first, last = wanted.removeprefix("bytes=").split("-")
                start, stop = int(first), min(int(last) + 1, len(data))
            self.send_response_only(200 if wanted is None else 206)
            if wanted is not None:
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(stop - start))
            self.end_headers()
            if body:
                self.wfile.write(data[start:stop])

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        state.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield state
        server.shutdown()


def backwards(source: Source) -> list[Any]:
    """All rows, each with requests of its own."""
    return [dict(source.row(number).values) for number in reversed(source.numbers)][::-1]


def now() -> str:
    return formatdate(time.time(), usegmt=True)


#: Headers of two versions of equal size.
HEADERS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "etag": ({"etag": '"1"'}, {"etag": '"2"'}),
    "time": ({"Last-Modified": OLD}, {"Last-Modified": NEW}),
    "both, one changes": ({"ETag": 'W/"1"', "Last-Modified": OLD}, {"ETag": 'W/"1"', "Last-Modified": NEW}),
    "both, then none": ({"ETag": '"1"', "Last-Modified": OLD}, {}),
    "neither": ({}, {}),
    "one time for both": ({"Last-Modified": "{now}", "Date": "{now}"}, {"Last-Modified": "{now}", "Date": "{now}"}),
    "no date": ({"Last-Modified": "yesterday"}, {"Last-Modified": "yesterday"}),
}


def two_versions(name: str) -> list[tuple[bytes, dict[str, str]]]:
    moment = now()
    headers = [{key: text.format(now=moment) for key, text in each.items()} for each in HEADERS[name]]
    return [(lines(1), headers[0]), (lines(2), headers[1])]


@pytest.mark.parametrize("name", HEADERS)
def test_rows_of_two_versions_of_equal_size_are_never_mixed(served, name):
    served.versions = two_versions(name)
    first = backwards(open_source(f"{served.url}/rows.jsonl"))
    assert first == [json.loads(line) for line in lines(1).splitlines()]
    second = [{**row, "version": 2} for row in first]
    requests, outcomes = len(served.requests), []
    assert requests > 30
    for at in (*range(12), *range(12, requests, 13)):
        served.requests.clear()
        served.version = lambda request, at=at: int(request >= at)
        try:
            rows = backwards(open_source(f"{served.url}/rows.jsonl"))
        except SourceError as error:
            outcomes.append(str(error))
        else:
            assert rows in (first, second)
    assert len(outcomes) > 5
    assert all("the object was replaced or removed while it was being read" in message for message in outcomes)


def test_an_object_of_another_size_is_refused(served):
    served.versions = [(lines(1), {"ETag": '"1"'}), (lines(1, 50), {"ETag": '"1"'})]
    source = open_source(f"{served.url}/rows.jsonl")
    served.version = lambda request: 1
    with pytest.raises(SourceError, match=r"rows.jsonl: the object was replaced .*it has 1300 bytes; it had 1560"):
        source.row(3)


def test_columns_of_parquet_are_compared_in_blocks(served, tmp_path: Path):
    rows = [{"n": n, "text": f"row {n} " * 20} for n in range(300)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=50)
    data = (tmp_path / "rows.parquet").read_bytes()
    served.versions = [(data, {}), (data[:700] + b"x" + data[701:], {})]
    source = open_source(f"{served.url}/rows.parquet")
    assert backwards(source) == rows
    assert source.identity == open_source(str(tmp_path / "rows.parquet")).identity
    served.version = lambda request: 1
    source = open_source(f"{served.url}/rows.parquet")
    served.version = lambda request: 0
    with pytest.raises(SourceError, match=r"bytes 512 to 767 are others than before"):
        source.row(0)


def test_without_an_etag_the_bytes_identify_the_source(served, tmp_path: Path):
    (tmp_path / "rows.jsonl").write_bytes(lines(1))
    for headers in ({}, {"Last-Modified": OLD}):
        served.versions = [(lines(1), headers)]
        assert open_source(f"{served.url}/rows.jsonl").identity == open_source(str(tmp_path / "rows.jsonl")).identity


def test_with_an_etag_nothing_is_asked_beside_the_rows(served):
    served.versions = [(lines(1), {"ETag": '"1"'})]
    source = open_source(f"{served.url}/rows.jsonl")
    assert source.identity["files"][0]["etag"] == "1"
    assert served.requests[:2] == ["HEAD", "GET bytes=0-0"]
    served.requests.clear()
    source.row(0)
    assert served.requests == ["GET bytes=0-1559"]


def test_a_server_without_ranges_is_refused(served):
    served.versions, served.ranges = [(lines(1), {"ETag": '"1"'})], False
    with pytest.raises(SourceError, match=r"rows.jsonl: the server does not answer range requests; download the file"):
        open_source(f"{served.url}/rows.jsonl")
    assert len(served.requests) == 2, "it is not asked again"


def test_an_empty_object_has_no_rows(served):
    served.versions = [(b"", {})]
    with pytest.raises(SourceError, match="it has no rows"):
        open_source(f"{served.url}/rows.jsonl")
