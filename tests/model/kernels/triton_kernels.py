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
