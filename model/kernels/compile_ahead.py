"""Compiles the kernels of a run into Triton's cache: ``python -m vlmdata.model.kernels.compile_ahead KERNELS``.

A process without a GPU context calls the functions with tensors without content, which gives the same kernels as the
trainer, and one fork of it compiles each. Triton alone compiles one after the other.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

from vlmdata.machine import available_cores
from vlmdata.model.kernels.ahead import hash_triton
from vlmdata.model.kernels.configurations import HOPPER, autotuners, choose_configurations
from vlmdata.model.kernels.hollow import import_flash_linear_attention
from vlmdata.model.kernels.shapes import Kernels


class Collector(Executor):
    """Keeps the calls that Triton submits for compilation, instead of making them."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], Any]] = []

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Keeps a call. Its future has no kernel, because nobody launches it here."""
        assert not args
        assert not kwargs
        self.calls.append(call)
        done: Future[Any] = Future()
        done.set_result(None)
        return done


class HopperWithoutContext:
    """Answers what Triton and flash-linear-attention ask of a driver, for an H100 or H200, without using one."""

    class Utils:
        """Properties of the device."""

        #: Bytes of shared memory that a program may have.
        SHARED_MEMORY = 232_448

        @classmethod
        def get_device_properties(cls, number: int) -> dict[str, int]:
            """The properties that choose among configurations."""
            return {"max_shared_mem": cls.SHARED_MEMORY, "multiprocessor_count": 132}

    utils = Utils()

    def get_current_target(self) -> Any:
        """The target of compilation."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 10 * HOPPER[0] + HOPPER[1], 32)

    def get_current_device(self) -> int:
        """The number of the device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default stream."""
        return 0

    def get_active_torch_device(self) -> Any:
        """The device on which functions allocate."""
        import torch

        return torch.device("meta")


def pretend_hopper() -> None:
    """Makes this process take its tensors for those of a Hopper GPU, before flash-linear-attention is imported."""
    import torch
    from triton.runtime.driver import driver

    driver.set_active(HopperWithoutContext())
    answers: dict[str, Any] = {
        "device_count": lambda: 1,
        "get_device_name": lambda *_: "NVIDIA H200",
        "get_device_capability": lambda *_: HOPPER,
        "device": lambda *_: contextlib.nullcontext(),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    if importlib.util.find_spec("fla") is not None:
        import fla.utils

        # It asks for the shared memory of a tensor's device, by number: a tensor without content has None.
        fla.utils.get_all_max_shared_mem = lambda: dict.fromkeys((0, None), HopperWithoutContext.Utils.SHARED_MEMORY)


def collect(run: Callable[[], None]) -> list[Callable[[], Any]]:
    """Returns calls that compile what a function launches. Nothing is compiled or launched yet."""
    import triton
    from triton.runtime.jit import KernelInterface

    launch = KernelInterface.__getitem__

    def without_launch(kernel: Any, grid: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: kernel.run(grid=grid, warmup=True, *args, **kwargs)  # noqa: B026

    collector = Collector()
    KernelInterface.__getitem__ = without_launch
    try:
        with triton.AsyncCompileMode(collector):
            run()
    finally:
        KernelInterface.__getitem__ = launch
    return collector.calls


def run_all_configurations(run: Callable[[], None]) -> None:
    """Runs a function with every configuration of its autotuners, so that none of them measures."""
    tuners = list(autotuners().values())
    every = [list(tuner.configs) for tuner in tuners]
    for number in range(max(map(len, every))):
        for tuner, configs in zip(tuners, every, strict=True):
            tuner.configs = [configs[number % len(configs)]]
        run()
    for tuner, configs in zip(tuners, every, strict=True):
        tuner.configs = configs


def compile_in_forks(calls: Sequence[Callable[[], Any]], processes: int) -> int:
    """Runs each call in a fork, up to ``processes`` at a time. Returns the number of calls that failed.

    Each fork prints a line of JSON: kernel, whether it was cached, and seconds. If it fails, its error goes to standard
    error instead.
    """
    launchers = _launchers_can_be_built()
    failed, running, waiting = 0, 0, list(calls)
    while waiting or running:
        if waiting and running < processes:
            call = waiting.pop(0)
            if os.fork() == 0:
                os._exit(_report(call, launchers))
            running += 1
        else:
            _, status = os.wait()
            running -= 1
            failed += status != 0
    return failed


def _report(call: Callable[[], Any], launchers: bool) -> int:
    """Compiles and prints the line. Returns the exit code."""
    begun = time.perf_counter()
    try:
        found = _compile(call, launchers)
    except Exception as error:  # the trainer meets it again, in the launch itself
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    line = json.dumps(found | {"seconds": round(time.perf_counter() - begun, 2)})
    os.write(1, (line + "\n").encode())  # one write, so that lines of several processes do not mix
    return 0


def _compile(call: Callable[[], Any], launchers: bool) -> dict[str, Any]:
    """Compiles a kernel and the C code that launches it. Returns the kernel's name, and whether it was cached."""
    from triton import knobs

    found: dict[str, Any] = {}
    knobs.compilation.listener = lambda *, src, cache_hit, **_: found.update(kernel=src.name, cached=cache_hit)
    kernel = call()
    if launchers:
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(kernel.src, kernel.metadata)
    return found


def _launchers_can_be_built() -> bool:
    """Whether this machine has CUDA's driver library, which launchers are linked to. Builds Triton's own part of it."""
    from triton.backends.nvidia.driver import CudaUtils, library_dirs

    try:
        library_dirs()
    except (AssertionError, OSError, subprocess.CalledProcessError):
        return False
    CudaUtils()
    return True


def machine_has_hopper() -> bool:
    """True if the first GPU is a Hopper GPU. A fork asks CUDA's driver, so that this process never uses CUDA."""
    asking = os.fork()
    if asking == 0:
        os._exit(0 if _capability() == HOPPER else 1)
    return os.waitpid(asking, 0)[1] == 0


def _capability() -> tuple[int, int] | None:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, values = ctypes.c_int(), [ctypes.c_int(), ctypes.c_int()]
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
        return None
    for attribute, value in zip((75, 76), values, strict=True):  # COMPUTE_CAPABILITY_MAJOR, _MINOR
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
    return values[0].value, values[1].value


def main() -> None:
    """Compiles the :class:`vlmdata.model.kernels.shapes.Kernels` given by their :meth:`command`."""
    kernels: Kernels = pickle.loads(bytes.fromhex(sys.argv[1]))
    if not machine_has_hopper():
        return
    pretend_hopper()
    hashing = hash_triton()
    import_flash_linear_attention()
    if not kernels.every:
        choose_configurations(kernels.decoder.delta_net.key_width, kernels.decoder.delta_net.value_width, HOPPER)
    calls = collect(lambda: run_all_configurations(lambda: kernels.run("meta")))
    print(json.dumps({"kernels": len(calls)}), flush=True)
    hashing.join()  # so that no fork does it again
    failed = compile_in_forks(calls, available_cores())
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
