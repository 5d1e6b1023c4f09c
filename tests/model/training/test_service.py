"""A run that reads from a collation service trains as a local run does, whatever happens to the servers."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from tests.model.training.conftest import steps_of, train_here
from tests.ports import free_port
from tests.service.servers import serving, start, wait_until

pytestmark = pytest.mark.slow


def test_losses_are_those_of_a_local_run_while_servers_are_killed_and_restarted(
    one_process: None, whole: Path, chats: Path, tmp_path: Path
) -> None:
    servers = [start(chats, "-j", 1, "--port", free_port()) for _ in range(2)]
    place = f"grpc://127.0.0.1:{servers[0].port},127.0.0.1:{servers[1].port}"
    log = tmp_path / "run" / "metrics.jsonl"

    def logged() -> int:
        with suppress(OSError):
            return log.read_text().count('"loss"')
        return 0

    def harm() -> None:
        for step, victim in ((1, 0), (2, 1), (3, 0)):
            wait_until(lambda step=step: logged() >= step, "the run does not go on")  # type: ignore[misc]
            servers[victim].kill()
            servers[victim] = servers[victim].again()

    harming = threading.Thread(target=harm)
    harming.start()
    try:
        train_here(tmp_path / "run", Path("unused"), data__paths=[place])
        harming.join()
    finally:
        for server in servers:
            server.stop()
    served, local = steps_of(tmp_path / "run"), steps_of(whole)
    assert [step["loss"] for step in served] == [step["loss"] for step in local]
    assert [step["grad_norm"] for step in served] == [step["grad_norm"] for step in local]


def test_a_run_moves_from_local_data_to_a_service(one_process: None, whole: Path, chats: Path, tmp_path: Path) -> None:
    train_here(tmp_path / "run", chats, run__steps=3, optimizer__decay_steps=12)
    with serving(chats, "-j", 1) as server:
        train_here(tmp_path / "run", Path("unused"), resume=True, data__paths=[server.url])
    assert [step["loss"] for step in steps_of(tmp_path / "run")] == [step["loss"] for step in steps_of(whole)]
