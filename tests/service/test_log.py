"""The server's log: bounded, and never waited for."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.flight as flight
import pytest
import trustme

from tests.service.test_access import certificate
from vlmdata import StreamingLoader
from vlmdata.service.server import log
from vlmdata.service.server.log import LogHandler


class Pipe:
    """A pipe whose end to write is full until it is read."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        os.set_blocking(self.writing, False)
        self.filled = 0
        try:
            while True:
                self.filled += os.write(self.writing, b"x" * 4096)
        except BlockingIOError:
            os.set_blocking(self.writing, True)


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    made = logging.Logger("test")
    yield made
    for handler in made.handlers:
        handler.close()


def refusals(logger: logging.Logger, count: int) -> None:
    for number in range(count):
        logger.warning("query refused", extra={"client": number})


def test_a_full_pipe_holds_nobody_up(logger: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_LINES", 10**9)
    monkeypatch.setattr(log, "_SECONDS_TO_CLOSE", 0.01)
    pipe = Pipe()
    with open(pipe.writing, "w") as stream:
        handler = LogHandler(stream, as_json=True)
        logger.addHandler(handler)
        # The thread holds as many at most, in a write that does not end, and as many wait.
        count = 2 * log._MOST_WAITING + 500
        refusals(logger, count)
        handler.close()  # does not wait either
        # Whoever reads it at last gets the first lines, and how many are missing.
        lines: list[dict[str, Any]] = []
        with open(pipe.reading, "rb") as reader:
            assert len(reader.read(pipe.filled)) == pipe.filled
            while not lines or lines[-1]["message"] != "lines left out":
                lines.append(json.loads(reader.readline()))
    assert [each["client"] for each in lines[:-1]] == list(range(len(lines) - 1))
    assert len(lines) - 1 + lines[-1]["lines"] == count
    assert lines[-1]["lines"] >= 500


def test_lines_of_one_kind_are_limited(
    logger: logging.Logger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = LogHandler(sys.stderr, as_json=False)
    logger.addHandler(handler)
    refusals(logger, 3 * log._LINES)
    logger.error("damaged data", extra={"file": "shard-000001.tar"})
    handler.close()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == [
        *(f"WARNING query refused client={number}" for number in range(log._LINES)),
        "ERROR damaged data file=shard-000001.tar",
        f"WARNING lines left out lines={2 * log._LINES}",
    ]


def test_a_later_period_has_lines_again(
    logger: logging.Logger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was left out is said at the end of a period, also if nothing else is logged."""
    monkeypatch.setattr(log, "_SECONDS", 0.1)
    handler = LogHandler(sys.stderr, as_json=False)
    logger.addHandler(handler)
    deadline, written = time.monotonic() + 60, ""
    refusals(logger, log._LINES + 1)
    while "lines left out" not in written and time.monotonic() < deadline:
        written += capsys.readouterr().err
    refusals(logger, 1)
    handler.close()
    assert "lines left out lines=1\n" in written
    assert "query refused client=0" in capsys.readouterr().err


def test_a_server_with_a_full_stderr_answers_refuses_and_stops(chat: Path, tmp_path: Path) -> None:
    """Strangers without its certificate, a query it refuses, and SIGTERM."""
    ca = trustme.CA()
    ca_file = tmp_path / "ca.pem"
    ca.cert_pem.write_to_path(str(ca_file))
    cert, key = certificate(ca, tmp_path, "localhost")
    pipe = Pipe()
    # A new interpreter: how it ends with a full pipe is its own affair.
    serve = [sys.executable, "-c", "from vlmdata.cli.main import main; main()", "serve"]
    command = [*serve, str(chat), "-j", "1", "--port", "0", "--tls-cert", str(cert), "--tls-key", str(key)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=pipe.writing, text=True)
    os.close(pipe.writing)
    assert process.stdout is not None
    try:
        port = int(process.stdout.readline().rpartition(":")[2])
        for _ in range(50):
            with socket.create_connection(("127.0.0.1", port), timeout=60) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                while stranger.recv(4096):
                    pass
        place = f"grpc+tls://localhost:{port}"
        client = flight.FlightClient(place, tls_root_certs=ca_file.read_bytes())
        for _ in range(30):
            with pytest.raises(flight.FlightServerError):
                list(client.do_get(flight.Ticket(b"{}"), flight.FlightCallOptions(timeout=60)))
        with StreamingLoader(place, tls_ca=ca_file, capacity=1024, global_batch=2) as loader:
            assert next(iter(loader))
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.communicate()
    os.close(pipe.reading)
