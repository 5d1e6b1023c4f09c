"""The CPU mode answers for CUDA while it is entered, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
import types
import warnings
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vlmdata.model.parallel import cpu_mode, environment
from vlmdata.model.parallel.environment import before_megatron

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")

NAMES = ("current_device", "current_stream", "synchronize", "Stream", "Event", "get_rng_state", "set_rng_state")


def test_requests_land_on_the_cpu() -> None:
    with cpu_mode.cpu_as_cuda():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.zeros(2, device=torch.cuda.current_device()).cuda().device.type == "cpu"
        assert torch.zeros(2).to("cuda:0").device.type == "cpu"
        assert torch.zeros(2, pin_memory=True).device.type == "cpu"
        assert torch.zeros(2).type() == "torch.cuda.FloatTensor"
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda.synchronize()
        state = torch.cuda.get_rng_state()
        first = torch.rand(3)
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.rand(3), first)


def test_nothing_stays_changed() -> None:
    before = [getattr(torch.cuda, name) for name in NAMES]
    others = (torch.cuda.random.get_rng_state, dist.all_to_all_single)
    kind = torch.zeros(2).type()
    with pytest.raises(KeyError), cpu_mode.cpu_as_cuda():
        raise KeyError
    assert [getattr(torch.cuda, name) for name in NAMES] == before
    assert (torch.cuda.random.get_rng_state, dist.all_to_all_single) == others
    assert torch.zeros(2).type() == kind


def test_norms_are_exact() -> None:
    values = torch.rand(3_000_000)
    with cpu_mode.cpu_as_cuda():
        norm = torch.norm(values)
    assert norm.dtype == torch.float32
    assert float(norm) == pytest.approx(float(values.double().norm()), rel=1e-7)


def test_it_touches_no_attribute_of_megatron() -> None:
    core = pytest.importorskip("megatron.core")
    before = {name: id(value) for name, value in vars(core).items()}
    with cpu_mode.cpu_as_cuda():
        assert {name: id(value) for name, value in vars(core).items()} == before


def test_megatron_cores_slips_are_not_reported_as_ours() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        before_megatron()
        with cpu_mode.cpu_as_cuda():
            assert torch.zeros(2, 2)[[slice(None), slice(1)]].shape == (2, 1)  # as its get_parameter_local_cp does
    assert not told


def start_on_the_cpu() -> None:
    original = torch.compile
    before_megatron()
    import_module("vlmdata.model.families.qwen3_5.build")

    with cpu_mode.cpu_as_cuda():
        pass
    assert torch.compile is original
    assert "megatron.core.fusions.fused_bias_swiglu" in sys.modules
    assert not {"torch._dynamo", "torch._inductor"} & set(sys.modules)


def start_on_a_gpu(compiled: bool) -> None:
    environment._load_bundled_cudnn = lambda: None  # type: ignore[assignment]
    torch.cuda.is_available = lambda: True
    before_megatron(compiled=compiled)
    import_module("megatron.core.fusions.fused_bias_swiglu")
    assert ("torch._inductor" in sys.modules) == compiled


STARTS = {
    "on the CPU": start_on_the_cpu,
    "on a GPU": partial(start_on_a_gpu, False),
    "on a GPU, compiled": partial(start_on_a_gpu, True),
}


def start_in_forks() -> None:
    """Makes each start in a fork of this process, which has imported torch; prints what went wrong."""
    assert not [name for name in sys.modules if name.startswith(("megatron", "torch._dynamo", "torch._inductor"))]
    for name, start in STARTS.items():
        if not (child := os.fork()):
            try:
                start()
            except BaseException:
                traceback.print_exc(file=sys.stdout)
            finally:
                sys.stdout.flush()
                os._exit(0)
        os.waitpid(child, 0)
        print(f"after {name}", flush=True)


@pytest.fixture(scope="module")
def said() -> str:
    """What a new interpreter says in which each start is made in a fork: importing torch takes 2 s of CPU time."""
    code = f"import {__name__} as here; here.start_in_forks()"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", STARTS)
def test_a_start_does_not_import_torchs_compiler_where_torch_compiles_nothing(said: str, name: str) -> None:
    pytest.importorskip("megatron.core")
    before, end, _ = said.partition(f"after {name}\n")
    assert end, said
    assert "Traceback" not in before.rpartition("after ")[2], before


class Driver:
    """CUDA's driver library; records the device whose context is created."""

    def __init__(self, devices: int) -> None:
        self.devices, self.opened = devices, list[int]()

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGet(self, device: Any, number: int) -> int:
        device._obj.value = number
        return int(number >= self.devices)

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        self.opened.append(device.value)
        return 0


@pytest.mark.parametrize(("rank", "opened"), [("1", [1]), ("2", [])])
def test_the_context_of_the_ranks_gpu_is_opened(monkeypatch: pytest.MonkeyPatch, rank: str, opened: list[int]) -> None:
    driver = Driver(2)
    monkeypatch.setattr(environment.ctypes, "CDLL", lambda name: driver)
    monkeypatch.setenv("LOCAL_RANK", rank)
    environment._open_cuda()
    assert driver.opened == opened


@pytest.mark.parametrize(("fuser", "stance"), [(torch.compile, "force_eager"), (lambda given: given, "default")])
def test_what_megatron_core_had_compiled_before_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, fuser: object, stance: str
) -> None:
    jit = types.ModuleType("megatron.core.jit")
    monkeypatch.setitem(sys.modules, jit.__name__, jit)
    monkeypatch.setattr(jit, "jit_fuser", fuser, raising=False)
    from torch._dynamo import eval_frame

    with torch.compiler.set_stance("default"):  # other tests' own mode may be entered
        with cpu_mode.cpu_as_cuda():
            assert eval_frame._stance.stance == stance
        assert eval_frame._stance.stance == "default"
