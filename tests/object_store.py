"""An S3 server in a process of its own (moto's), and what programs need to know of it in their environment."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest

#: How the server is told its port, and tells us which one it got.
_SERVE = """
from threading import Lock
from werkzeug.serving import make_server
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
app = DomainDispatcherApplication(create_backend_app)
conditional = Lock()

def atomic(environ, start_response):
    if "HTTP_IF_NONE_MATCH" not in environ:
        return app(environ, start_response)
    with conditional:  # moto looks and then writes; S3 does both in one step
        return list(app(environ, start_response))

server = make_server("127.0.0.1", 0, atomic, threaded=True, request_handler=MotoRequestHandler)
print(server.port, flush=True)
server.serve_forever()
"""
_SECONDS_TO_START = 60.0
_numbers = count()


@dataclass(frozen=True)
class ObjectStore:
    """A running S3 server.

    Attributes:
        endpoint: Its URL.
        bucket: The test's own bucket, empty at first.
    """

    endpoint: str
    bucket: str = ""

    @property
    def url(self) -> str:
        """The bucket as a URL of fsspec."""
        return f"s3://{self.bucket}"

    @property
    def environment(self) -> Mapping[str, str]:
        """What botocore reads, and with it s3fs, boto3 and the AWS command line."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            # The response of a successful retry is what tests look at, not how long botocore waits before it.
            "AWS_MAX_ATTEMPTS": "3",
        }

    def file_system(self) -> Any:
        """A file system of s3fs on this server, without cached listings. Tests share it: a session takes 0.1 s."""
        return _file_system(self.endpoint)

    def put(self, folder: Path, below: str = "") -> str:
        """Copies a folder or file into the bucket; gives its URL there."""
        place = "/".join(part for part in (self.bucket, below) if part)
        files = self.file_system()
        for path in sorted(folder.rglob("*")) if folder.is_dir() else [folder]:
            if path.is_file():
                name = path.relative_to(folder).as_posix() if folder.is_dir() else path.name
                files.pipe_file(f"{place}/{name}", path.read_bytes())
        return f"s3://{place}" if folder.is_dir() else f"s3://{place}/{folder.name}"


@cache
def _file_system(endpoint: str) -> Any:
    import s3fs

    return s3fs.S3FileSystem(
        endpoint_url=endpoint, key="test", secret="test", skip_instance_cache=True, use_listings_cache=False
    )


@contextlib.contextmanager
def serving(log: Path) -> Iterator[ObjectStore]:
    """Runs a server until the block is left.

    Args:
        log: File for what it prints.
    """
    # A moto process answers requests of services it simulates from one Python process: enough for tests.
    with (
        open(log, "ab") as errors,
        subprocess.Popen([sys.executable, "-c", _SERVE], stdout=subprocess.PIPE, stderr=errors) as server,
    ):
        try:
            assert server.stdout is not None
            port = server.stdout.readline().strip().decode()
            assert port, log.read_text()[-2000:]
            store = ObjectStore(f"http://127.0.0.1:{port}")
            _wait_for(store)
            yield store
        finally:
            server.kill()


def _wait_for(store: ObjectStore) -> None:
    ends = time.monotonic() + _SECONDS_TO_START
    while True:
        try:
            with urllib.request.urlopen(f"{store.endpoint}/moto-api/", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            if time.monotonic() > ends:
                raise
            time.sleep(0.05)


@pytest.fixture(scope="session")
def object_store_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """The server, one per test process."""
    with serving(tmp_path_factory.mktemp("object_store") / "log.txt") as store:
        yield store


@pytest.fixture
def object_store(object_store_server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """A bucket of the test's own; this process and those it starts find the server by their environment."""
    from botocore import retryhandler

    store = ObjectStore(object_store_server.endpoint, f"bucket-{os.getpid()}-{next(_numbers)}")
    store.file_system().mkdir(store.bucket)
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    # Botocore waits for up to 1, 2, 4 and 8 s between its attempts: here for a twentieth.
    pause = retryhandler.delay_exponential
    monkeypatch.setattr(retryhandler, "delay_exponential", lambda *given, **named: pause(*given, **named) / 20)
    forget_file_systems()
    yield store
    forget_file_systems()


def forget_file_systems() -> None:
    """Clears file systems: they keep the endpoint and the listings that they were made with."""
    import s3fs

    from vlmdata import locations

    locations.forget_file_systems()
    s3fs.S3FileSystem.clear_instance_cache()
