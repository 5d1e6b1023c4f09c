"""The kernels of GELU with a bias equal torch in float64, in Triton's interpreter on the CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.model.kernels.biased_gelu import compared
from tests.model.kernels.interpreter import accept_scalar_bounds

#: Errors that rounding allows. The interpreter cuts bfloat16 off: up to 2^-8.
LIMITS = {torch.float32: 1e-6, torch.bfloat16: 5e-3}

#: Tilings with few programs, each of which has several tiles, the last ones in part or not at all.
tilings = st.tuples(st.sampled_from([1, 2, 8]), st.sampled_from([16, 64, 256]), st.just(4), st.integers(1, 9))


def interpreted() -> None:
    from vlmdata.model.kernels import biased_gelu
    from vlmdata.model.kernels.biased_gelu import GeluTiling

    accept_scalar_bounds()
    chosen = biased_gelu.FORWARD, biased_gelu.BACKWARD

    @settings(max_examples=8, deadline=None, database=None)
    @given(st.integers(0, 40), st.integers(1, 300), st.none() | tilings, st.sampled_from(sorted(LIMITS, key=str)))
    @example(0, 64, None, torch.bfloat16)
    @example(1, 1, None, torch.float32)
    @example(19, 4304, None, torch.bfloat16)
    def equal(rows: int, width: int, tiling: tuple[int, int, int, int] | None, dtype: torch.dtype) -> None:
        both = chosen if tiling is None else (GeluTiling(*tiling), GeluTiling(*tiling))
        biased_gelu.FORWARD, biased_gelu.BACKWARD = both
        errors = compared(rows, width, dtype)
        # A sum of few values of either sign can be about 0.
        limit = LIMITS[dtype] * (1 if width > 16 else 10)
        assert max(errors.values()) < limit, errors

    equal()


def with_frozen_inputs() -> None:
    accept_scalar_bounds()
    for frozen in (("product",), ("bias",)):
        errors = compared(7, 24, torch.float32, frozen)
        assert set(errors) == {"out", "dproduct", "dbias"} - {f"d{name}" for name in frozen}
        assert max(errors.values()) < LIMITS[torch.float32], (frozen, errors)


def of_extreme_values() -> None:
    """Where sigmoid is 0 or 1, the function is 0 or x, and its derivative 0 or 1, as torch has it."""
    from vlmdata.model.kernels.biased_gelu import gelu_with_bias

    accept_scalar_bounds()
    x = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 12, -12, 50, -50, 3e4, -3e4, 1e9, -1e9], requires_grad=True)
    bias = torch.zeros(len(x), requires_grad=True)
    out, wanted = gelu_with_bias(x[None], bias)[0], F.gelu(x, approximate="tanh")
    torch.testing.assert_close(out, wanted, rtol=1e-6, atol=1e-30)
    (d, dbias), (expected,) = torch.autograd.grad(out.sum(), (x, bias)), torch.autograd.grad(wanted.sum(), x)
    torch.testing.assert_close(d, expected, rtol=1e-6, atol=1e-5)
    assert torch.equal(d, dbias)
