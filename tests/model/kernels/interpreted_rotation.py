"""The Triton kernel that splits heads and rotates equals torch in float64, in Triton's interpreter on the CPU."""

from __future__ import annotations

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.model.kernels.interpreter import accept_scalar_bounds
from tests.model.kernels.rotation import compared

#: Errors that rounding allows. The interpreter cuts bfloat16 off: up to 2^-8.
LIMITS = {torch.float32: 1e-6, torch.bfloat16: 5e-3}


def interpreted() -> None:
    from vlmdata.model.kernels import rotation
    from vlmdata.model.kernels.rotation import RotationTiling

    accept_scalar_bounds()
    chosen = rotation.FORWARD, rotation.BACKWARD
    # Few programs have several tiles each, the last ones in part or not at all.
    tilings = st.builds(RotationTiling, st.sampled_from([1, 16, 64]), st.just(8), st.integers(1, 4))

    @settings(max_examples=8, deadline=None, database=None)
    @given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 9), st.none() | tilings, st.sampled_from([*LIMITS]))
    @example(0, 2, 8, None, torch.bfloat16)
    @example(7, 16, 36, None, torch.bfloat16)
    @example(5, 12, 32, None, torch.float32)
    def equal(rows: int, heads: int, half: int, tiling: RotationTiling | None, dtype: torch.dtype) -> None:
        rotation.FORWARD, rotation.BACKWARD = chosen if tiling is None else (tiling, tiling)
        errors = compared(rows, heads, 2 * half, dtype)
        assert max(errors.values()) < LIMITS[dtype], errors

    equal()


def with_frozen_inputs() -> None:
    accept_scalar_bounds()
    for frozen in (("mixed",), ("bias",)):
        errors = compared(7, 3, 12, torch.float32, frozen)
        assert set(errors) == {"query", "key", "value", "dmixed", "dbias"} - {f"d{name}" for name in frozen}
        assert max(errors.values()) < LIMITS[torch.float32], (frozen, errors)
