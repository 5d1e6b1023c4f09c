"""Shorter launches of Triton kernels, and what grids are computed with.

A step of 0.8b launches 508 of them. For each, Triton 3.6 writes the options as text, calls hooks that nobody has set,
and describes the launch for them; its heuristics and autotuners copy all arguments several times. Kernels,
configurations and arguments are the same here (``tests/model/kernels/test_launches.py``).
"""

from __future__ import annotations

from typing import Any

import triton
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

#: The version of Triton whose methods are known.
_VERSION = "3.6."
_run, _tune = JITFunction.run, Autotuner.run


def cdiv(dividend: int, divisor: int) -> int:
    """Divides and rounds up. Triton's own takes 1.1 µs, because it also works in kernels."""
    return -(-dividend // divisor)


def next_power_of_2(number: int) -> int:
    """Returns the smallest power of two that is not below a number from 1."""
    return 1 << (number - 1).bit_length()


def shorten_launches() -> None:
    """Replaces the way in which Triton launches, for this process. Other versions keep theirs."""
    if triton.__version__.startswith(_VERSION):
        JITFunction.run, Autotuner.run, Heuristics.run = _launch, _launch_tuned, _launch_with_heuristics


def _launch(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    """Launches a kernel as ``JITFunction.run`` does, which is called if the kernel is new or hooks are set."""
    runtime = knobs.runtime
    watched = runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls or self.pre_run_hooks
    if warmup or watched or self.debug or runtime.debug:
        return _run(self, *args, grid=grid, warmup=warmup, **options)
    device = driver.active.get_current_device()
    bind = self.device_caches[device][4]
    bound, specialization, others = bind(*args, **options)
    launched = self.__dict__.setdefault("_launched", {})
    key = device, *specialization, *others.items()
    kernel = launched.get(key)
    if kernel is None:
        kernel = _run(self, *args, grid=grid, warmup=False, **options)
        if isinstance(kernel, CompiledKernel):
            launched[key] = kernel
        return kernel
    x, y, z = (*(grid(bound) if callable(grid) else grid), 1, 1)[:3]
    stream = driver.active.get_current_stream(device)
    without_hooks = (None, None, None)
    kernel.run(x, y, z, stream, kernel.function, kernel.packed_metadata, *without_hooks, *bound.values())
    return kernel


def _launch_tuned(self: Any, *args: Any, **options: Any) -> Any:
    """Launches with the configuration that ``Autotuner.run`` chose for such arguments, or has it choose."""
    only, *others = self.configs
    if not others:
        return _tune(self, *args, **options) if only.pre_hook else self.fn.run(*args, **options, **only.all_kwargs())
    named = {**dict(zip(self.arg_names, args, strict=False)), **options}
    dtypes = [each.dtype for each in named.values() if hasattr(each, "dtype")]
    key = (*[named.get(each) for each in self.keys], *dtypes)
    chosen = self.__dict__.setdefault("_chosen", {})
    if key in chosen:
        return self.fn.run(*args, **options, **chosen[key])
    kernel = _tune(self, *args, **options)
    if not self.best_config.pre_hook:
        chosen[key] = self.best_config.all_kwargs()
    return kernel


def _launch_with_heuristics(self: Any, *args: Any, **options: Any) -> Any:
    """Adds the constants that depend on arguments, as ``Heuristics.run`` does."""
    named = {**dict(zip(self.arg_names, args, strict=False)), **options}
    for name, constant in self.values.items():
        options[name] = named[name] = constant(named)
    return self.fn.run(*args, **options)
