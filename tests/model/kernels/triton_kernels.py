"""Two kernels, one of which does not compile."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add(x, y, size: tl.constexpr):  # type: ignore[no-untyped-def]
    """Adds x to y."""
    at = tl.arange(0, size)
    tl.store(y + at, tl.load(x + at) + tl.load(y + at))


@triton.jit
def broken(x):  # type: ignore[no-untyped-def]
    """Calls a function that there is not."""
    tl.store(x, tl.no_such_function(x))


@triton.heuristics({"HAS_BIAS": lambda args: args["bias"] is not None, "TWICE": lambda args: args["HAS_BIAS"]})
@triton.autotune([triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64}, num_warps=2)], key=["width"])
@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def scale(  # type: ignore[no-untyped-def]
    x, bias, y, rows, width, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, TWICE: tl.constexpr
):
    """Adds a bias to the first values of x, if there is one."""
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < rows * width, other=0)
    if HAS_BIAS and TWICE:
        value += tl.load(bias + at)
    tl.store(y + at, value)
