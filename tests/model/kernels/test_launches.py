"""Shorter launches give a kernel the same arguments as Triton's own, on a driver that only notes what is launched."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.forked import MODELS, run_forked

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton here")


def launches() -> None:
    """Prints what the calls below launch, by Triton's own way, and by the shorter way in a first and a second round."""
    import torch
    import triton
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.driver import driver

    from model.kernels.compile_ahead import HopperWithoutContext, pretend_hopper

    pretend_hopper()
    noted: list[Any] = []

    class Launcher:
        def __init__(self, src: Any, metadata: Any) -> None:
            pass

        def __call__(self, *args: Any) -> None:
            places = (each.data_ptr() % 16 if isinstance(each, torch.Tensor) else repr(each) for each in args[9:])
            noted.append((*args[:5], list(args[5]), *places))
            if args[7] is not None:
                args[7](args[6])

    def load_binary(name: str, kernel: bytes, shared: int, device: int) -> tuple[int, ...]:
        return 1, len(kernel), 32, 0, 1024

    driver.active.launcher_cls = Launcher
    HopperWithoutContext.Utils.load_binary = staticmethod(load_binary)  # type: ignore[attr-defined]
    from model.kernels.launches import shorten_launches
    from tests.model.kernels.triton_kernels import add, scale

    asked: list[str] = []

    def timed(call: Any, quantiles: Any = None) -> list[float]:
        asked.append("timed")
        pair, second = divmod(len(asked) - 1, 2)
        return [float(second == pair % 2)] * 3  # the first and the second configuration are the faster one in turn

    tuner: Any = scale.fn
    assert isinstance(tuner, Autotuner)
    tuner.do_bench = timed
    x, odd = torch.zeros(128), torch.zeros(129)[1:]

    def calls() -> list[Any]:
        noted.clear()
        for kind in (x, x.half(), odd):
            add[(1,)](kind, x, 64)
            add[(2, 3)](kind, x, size=32, num_warps=2)
            for rows in (3, 16):
                scale[lambda args: (args["rows"], args["BLOCK"], 5)](kind, None, x, rows, 8)
                scale[(rows,)](kind, x, x, rows=rows, width=9)
                scale[(rows,)](kind, x, x, rows=rows, width=1)
        return list(noted)

    calls()
    theirs, before = calls(), len(asked)
    shorten_launches()
    rounds = [calls(), calls()]
    after = len(asked)
    seen: list[str] = []
    triton.knobs.runtime.launch_enter_hook.add(lambda metadata: seen.append(metadata.get()["name"]))
    add[(1,)](x, x, 64)
    print(json.dumps({"theirs": theirs, "rounds": rounds, "timed": after - before, "seen": seen}))


@needs_triton
def test_launches_are_the_same(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = run_forked(
        f"{__name__}:launches", server=MODELS, env=environment | {"TRITON_CACHE_DIR": str(tmp_path)}, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["theirs"]) == 24
    assert len({json.dumps(each) for each in found["theirs"]}) > 15, "kernels, grids and arguments differ among calls"
    assert found["rounds"] == [found["theirs"]] * 2
    assert found["timed"] == 0, "configurations are not chosen again"
    assert found["seen"] == ["add"], "a hook sees launches"


@needs_triton
def test_host_functions_are_tritons() -> None:
    import triton

    from model.kernels.launches import cdiv, next_power_of_2

    for number in range(1, 70):
        assert next_power_of_2(number) == triton.next_power_of_2(number)
        assert [cdiv(number, each) for each in range(1, 9)] == [triton.cdiv(number, each) for each in range(1, 9)]
