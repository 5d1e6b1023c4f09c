"""The checks of two GPUs run on two processes of the CPU, so that none fails on a GPU before its model runs."""

from __future__ import annotations

import pytest

from tests.model.workers import run_in_all

pytest.importorskip("megatron.core")

pytestmark = pytest.mark.slow


def checks_of_two() -> list[str]:
    """Runs all checks of two GPUs one after another."""
    from tests.model.gpu_layouts import TWO_GPUS
    from vlmdata.model.parallel import groups

    groups.initialize()
    for name, check in TWO_GPUS.items():
        try:
            check()
        except Exception as error:
            error.add_note(f"in the check {name!r}")
            raise
    return list(TWO_GPUS)


def test_the_checks_of_two_gpus_hold() -> None:
    first, second = run_in_all(checks_of_two, world=2)
    assert first == second
    assert len(first) > 10
