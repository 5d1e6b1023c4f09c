"""Fixtures of the tests of preprocessing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from typing import Any

import pytest

from tests.preprocess.command_line import Ended
from vlmdata.cli.main import main


@pytest.fixture(scope="package", autouse=True)
def _own_server_of_processes() -> Iterator[None]:
    """Python keeps one server that processes are forked from. One that earlier tests started lacks what workers need,
    and each worker would import it again: 2.5 s of CPU time.
    """
    forkserver._forkserver._stop()
    yield
    forkserver._forkserver._stop()


@pytest.fixture
def vlmdata(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Runs the console script's function in this process: what it says and how it exits, without its start-up."""

    def call(*arguments: Any) -> Ended:
        monkeypatch.setattr(sys, "argv", ["vlmdata", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "120")
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        output = capsys.readouterr()
        code = caught.value.code
        return Ended(code if isinstance(code, int) else int(code is not None), output.out, output.err)

    return call
