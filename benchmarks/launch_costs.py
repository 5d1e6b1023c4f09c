"""CPU time of the host to launch each Triton kernel of a step of 0.8b, by Triton's own way and by the shorter one.

    python benchmarks/launch_costs.py

Needs no GPU: the driver launches nothing, so the time of CUDA itself is missing. Needs flash-linear-attention and
einops. Prints microseconds per launch, and milliseconds per step with as many launches of each kernel as in a profile
(benchmarks/results/host-of-0.8b-2026-11-28.md). Without GPU, tensors have no content, and Triton compiles nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model.kernels.compile_ahead import pretend_hopper
from model.kernels.hollow import import_flash_linear_attention

pretend_hopper()
import_flash_linear_attention()

import triton
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import CompiledKernel
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.jit import JITFunction, KernelInterface

from model.families import preset, spec_of
from model.kernels import launches
from model.kernels.configurations import HOPPER, autotuners, choose_configurations
from model.kernels.delta_rule import DeltaRule
from model.kernels.shapes import Kernels, TowerKernels
from model.training.settings.config import TrainConfig
from model.training.settings.model_settings import settings_of

#: Launches of a kernel per step, where they are not one for each of the 18 delta nets.
PER_STEP = {
    "_gate": 64, "_sum_and_norm": 36, "_sum_and_norm_backward": 36, "_norm_and_gate": 36, "_split_norm_rotate": 14,
    "_split_and_rotate": 24, "_gelu_with_bias": 12, "_gelu_with_bias_backward": 12,
    "chunk_local_cumsum_scalar_kernel": 36,
}  # fmt: skip
#: Calls of ``triton.cdiv`` and ``triton.next_power_of_2`` per step in that profile.
HOST_FUNCTIONS = 1066


class Unlaunched(CompiledKernel):  # type: ignore[misc]
    """A kernel with Triton's Python around its launch, and nothing in its place."""

    def __init__(self) -> None:
        self.name, self.src, self.module, self.function, self.packed_metadata = "", None, 1, 1, (4, 1, 0)
        self._run = CudaLauncher.__new__(CudaLauncher)
        self._run.launch, self._run.num_ctas = (lambda *_: None), 1
        self._run.global_scratch_size = self._run.profile_scratch_size = 0
        self._run.global_scratch_align = self._run.profile_scratch_align = 1
        self._run.launch_cooperative_grid = self._run.launch_pdl = False


def _compiled(self: Any, key: str, signature: Any, device: int, *_: Any) -> Unlaunched:
    kernel = self.device_caches[device][0][key] = Unlaunched()
    return kernel


def _recorded(run: Callable[[], None]) -> dict[str, tuple[Any, Any, Any, Any]]:
    """Returns one launch of each kernel, by name: the function, its grid and its arguments."""
    found: dict[str, tuple[Any, Any, Any, Any]] = {}
    launch = KernelInterface.__getitem__

    def recording(kernel: Any, grid: Any) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            inner = kernel
            while hasattr(inner, "fn") and not isinstance(inner, JITFunction):
                inner = inner.fn
            found[inner.fn.__name__] = kernel, grid, args, options
            return launch(kernel, grid)(*args, **options)

        return call

    KernelInterface.__getitem__ = recording
    run()
    KernelInterface.__getitem__ = launch
    return found


def _microseconds(call: Callable[[], Any], times: int = 300, rounds: int = 12) -> float:
    """Returns the CPU time of a call, in the fastest round."""
    call()
    best = float("inf")
    for _ in range(rounds):
        begun = time.process_time()
        for _ in range(times):
            call()
        best = min(best, (time.process_time() - begun) / times)
    return best * 1e6


def _kernels() -> Kernels:
    architecture = preset("0.8b")
    config = TrainConfig()
    decoder = spec_of(architecture).kernels(architecture, settings_of(config, architecture, on_gpu=True), 8192)
    vision = architecture.vision
    assert decoder is not None
    tower = TowerKernels(vision.num_heads, vision.head_dim, vision.hidden_size, vision.intermediate_size)
    return Kernels(decoder, tower, vocabulary=None, every=False)


def main() -> None:
    """Prints the table."""
    assert DeltaRule  # what a step calls; it launches the kernels of flash-linear-attention's own function
    JITFunction._do_compile = _compiled
    choose_configurations(128, 128, HOPPER)
    for tuner in autotuners().values():
        tuner.do_bench, tuner.cache_results = (lambda *_, **__: [1.0] * 3), False
    theirs = JITFunction.run, Autotuner.run, Heuristics.run
    kernels = _kernels()
    found = _recorded(lambda: kernels.run("meta"))
    print("| kernel | launches per step | µs per launch, Triton's | shorter |\n|---|---|---|---|")
    sums = [0.0, 0.0]
    for name, (kernel, grid, args, options) in sorted(found.items()):
        number = PER_STEP.get(name, 18)
        JITFunction.run, Autotuner.run, Heuristics.run = theirs
        took = [_microseconds(lambda: kernel[grid](*args, **options))]  # noqa: B023
        launches.shorten_launches()
        took.append(_microseconds(lambda: kernel[grid](*args, **options)))  # noqa: B023
        sums = [total + number * each / 1000 for total, each in zip(sums, took, strict=True)]
        print(f"| {name} | {number} | {took[0]:.1f} | {took[1]:.1f} |")
    host = [_microseconds(lambda: triton.cdiv(8192, 64)), _microseconds(lambda: launches.cdiv(8192, 64))]
    print(f"| cdiv | {HOST_FUNCTIONS} | {host[0]:.2f} | {host[1]:.2f} |")
    sums = [total + HOST_FUNCTIONS * each / 1000 for total, each in zip(sums, host, strict=True)]
    print(f"\nA step: {sums[0]:.2f} ms, {sums[1]:.2f} ms")


if __name__ == "__main__":
    main()
