"""A server offers all versions of its datasets, as long as they exist: runs go on with theirs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.changing_source import Team, row
from tests.service.servers import assert_equal
from vlmdata import StreamingLoader
from vlmdata.errors import ConfigMismatchError, UsageError
from vlmdata.service.server.config import ServerConfig
from vlmdata.service.server.server import CollationServer
from vlmdata.storage import open_store
from vlmdata.storage.prune import prune


@contextmanager
def serving(*data: Any, port: int = 0) -> Iterator[CollationServer]:
    with closing(CollationServer(data, ServerConfig(port=port, workers=1, drain=1.0))) as server:
        yield server


def stream(data: Any) -> StreamingLoader:
    return StreamingLoader(data, capacity=128, global_batch=1, timeout=240.0)


def opened(place: str) -> list[str]:
    """Fingerprints of what a loader opens."""
    with stream(place) as loader:
        return [fingerprint for _, fingerprint in loader.fingerprints]


@pytest.fixture
def team(tmp_path: Path) -> Team:
    team = Team(tmp_path)
    team.run()
    return team


def test_a_run_goes_on_at_a_server_that_was_restarted_with_a_newer_version(team: Team) -> None:
    with stream(team.out) as local:
        expected = list(local)
    with serving(team.out) as server:
        port = server.port
        loader = stream(f"grpc://127.0.0.1:{port}")
        batches = iter(loader)
        made = [next(batches)]
        state = json.loads(json.dumps(loader.state_dict()))
    team.run([*team.rows[2:], row("new"), row("newer")])
    with serving(team.out, port=port):
        made += batches
        for a, b in zip(made, expected, strict=True):
            assert_equal(a, b)
        loader.close()
        for place in ("", "/out"):
            with stream(f"grpc://127.0.0.1:{port}{place}") as resumed:
                resumed.load_state_dict(state)
                for a, b in zip(resumed, expected[1:], strict=True):
                    assert_equal(a, b)
        with stream(f"grpc://127.0.0.1:{port}/out@2") as other, pytest.raises(ConfigMismatchError, match="another run"):
            other.load_state_dict(state)  # a version that was named is kept


def test_versions_have_names_while_they_exist(team: Team) -> None:
    first = [team.version().manifest.fingerprint]
    team.run(team.rows[1:])
    second = [team.version().manifest.fingerprint]
    with serving(team.out) as server:
        url = f"grpc://127.0.0.1:{server.port}"
        assert opened(url) == opened(f"{url}/out") == opened(f"{url}/out@2") == opened(f"{url}/{second[0][:12]}")
        assert opened(f"{url}/out@1") == opened(f"{url}/{first[0][:12]}") == first
        team.run([*team.rows, row("third")])
        third = [team.version().manifest.fingerprint]
        assert opened(f"{url}/out") == opened(f"{url}/out@3") == third  # made while the server runs
        with stream(f"{url}/out@3") as served, stream(team.out) as local:
            for a, b in zip(islice(served, 3), islice(local, 3), strict=True):
                assert_equal(a, b)
        prune(open_store(team.out), [1])
        with pytest.raises(UsageError, match=r"no dataset 'out@1'; the service has: out \(\w+\), out@2"):
            opened(f"{url}/out@1")
    with serving(f"{team.out}@2", f"{team.out}@3") as server:
        url = f"grpc://127.0.0.1:{server.port}"
        assert opened(url) == second + third
        assert opened(f"{url}/out") == opened(f"{url}/out@3") == third
        assert opened(f"{url}/out@2") == second
    with serving(f"{team.out}@2") as server:
        assert opened(f"grpc://127.0.0.1:{server.port}/out") == second
