"""Triton kernels for a delta net's decay, ``-exp(a) softplus(alpha + b)``, and step, ``sigmoid(beta)``, in float32.

They take the place of a dozen small kernels of torch. Shapes: tokens T, value heads h.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Values of a tile, and warps of a program.
_TILE, _WARPS = 2048, 4
#: Terms of the series of log(1 + e): what seven leave out is a hundred-millionth of it.
_TERMS = 7


def decays(x: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the decay's logarithm, float32 (T, h), and beta (T, h) in the dtype of x.

    x is (T, 2 h), columns of beta before those of alpha; rows may be apart. ``a_log`` (h,) is the logarithm of the
    rate, and ``dt_bias`` (h,) is added to alpha.
    """
    tokens, heads = x.shape[0], a_log.shape[0]
    decay = x.new_empty(tokens, heads, dtype=torch.float32)
    beta = x.new_empty(tokens, heads)
    constants = _constants(x, heads)
    _delta_decays[(triton.cdiv(tokens, constants["rows"]),)](x, a_log, dt_bias, decay, beta, tokens, **constants)
    return decay, beta


def decays_backward(
    x: Tensor, a_log: Tensor, dt_bias: Tensor, grads: tuple[Tensor, Tensor], dx: Tensor, sums: Tensor, block: int
) -> None:
    """Computes the gradients from those of decay and beta, ``grads``. The first three are as in :func:`decays`.

    ``dx``, (T, 2 h), is written, and ``sums``, float32 (blocks of ``block`` tokens, 2 h): its sum over blocks is the
    gradient of ``a_log`` and of ``dt_bias``, one beside the other. Rows may be apart. A block has whole tiles.
    """
    tokens, heads = x.shape[0], a_log.shape[0]
    constants = _constants(x, heads)
    assert sums.shape == (triton.cdiv(tokens, block), 2 * heads)
    assert block % constants["rows"] == 0, (block, constants)
    ddecay, dbeta = (each.contiguous() for each in grads)
    _delta_decays_backward[(sums.shape[0],)](
        x, a_log, dt_bias, ddecay, dbeta, dx, sums, tokens,
        **constants, dx_stride=dx.stride(0), sums_stride=sums.stride(0),
        steps=triton.cdiv(min(block, tokens), constants["rows"]),
    )  # fmt: skip


def _constants(x: Tensor, heads: int) -> dict[str, int]:
    assert (x.shape[1], x.stride(1)) == (2 * heads, 1), (x.shape, x.stride(), heads)
    columns = triton.next_power_of_2(heads)
    rows = max(1, min(64, _TILE // columns))
    sizes = {"stride": x.stride(0), "heads": heads, "columns": columns, "rows": rows}
    return sizes | {"terms": _TERMS, "num_warps": _WARPS}


@triton.jit  # type: ignore[untyped-decorator]
def _softplus(x, terms: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton compiles it, as all that follow
    """log(1 + exp(x)) without loss of small values, which ``log`` near 1 would lose.

    With s = e / (2 + e), log(1 + e) = 2 (s + s^3 / 3 + s^5 / 5 + …); s is at most 1/3.
    """
    small = tl.exp(-tl.abs(x))
    ratio = small / (2 + small)
    square = ratio * ratio
    total = tl.zeros_like(x)
    for number in tl.static_range(terms):
        total = total * square + 1.0 / (2 * (terms - 1 - number) + 1)
    return tl.maximum(x, 0.0) + 2 * ratio * total


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _delta_decays(  # type: ignore[no-untyped-def]
    x, a_log, dt_bias, decay, beta, tokens,
    stride: tl.constexpr, heads: tl.constexpr, columns: tl.constexpr, rows: tl.constexpr, terms: tl.constexpr,
):  # fmt: skip
    """All heads of some tokens."""
    row = (tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows))[:, None]
    head = tl.arange(0, columns)[None, :]
    known = head < heads
    mask = (row < tokens) & known
    source = x + row * stride + head
    step = tl.sigmoid(tl.load(source, mask=mask, other=0.0).to(tl.float32))
    alpha = tl.load(source + heads, mask=mask, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(a_log + head, mask=known, other=0.0).to(tl.float32))
    bias = tl.load(dt_bias + head, mask=known, other=0.0).to(tl.float32)
    tl.store(decay + row * heads + head, -rate * _softplus(alpha + bias, terms), mask=mask)
    tl.store(beta + row * heads + head, step.to(beta.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _delta_decays_backward(  # type: ignore[no-untyped-def]
    x, a_log, dt_bias, ddecay, dbeta, dx, sums, tokens,
    stride: tl.constexpr, heads: tl.constexpr, columns: tl.constexpr, rows: tl.constexpr, terms: tl.constexpr,
    dx_stride: tl.constexpr, sums_stride: tl.constexpr, steps: tl.constexpr,
):  # fmt: skip
    """All heads of a block of tokens."""
    block = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, columns)[None, :]
    known = head < heads
    rate = tl.exp(tl.load(a_log + head, mask=known, other=0.0).to(tl.float32))
    bias = tl.load(dt_bias + head, mask=known, other=0.0).to(tl.float32)
    of_rate = tl.zeros((rows, columns), tl.float32)
    of_bias = tl.zeros((rows, columns), tl.float32)
    for number in range(steps):
        row = ((block * steps + number) * rows + tl.arange(0, rows))[:, None]
        mask = (row < tokens) & known
        source = x + row * stride + head
        step = tl.sigmoid(tl.load(source, mask=mask, other=0.0).to(tl.float32))
        total = tl.load(source + heads, mask=mask, other=0.0).to(tl.float32) + bias
        gradient = -rate * tl.load(ddecay + row * heads + head, mask=mask, other=0.0)
        of_rate += gradient * _softplus(total, terms)
        gradient *= tl.sigmoid(total)
        of_bias += gradient
        target = dx + row * dx_stride + head
        tl.store(target + heads, gradient.to(dx.dtype.element_ty), mask=mask)
        gradient = tl.load(dbeta + row * heads + head, mask=mask, other=0.0).to(tl.float32) * step * (1 - step)
        tl.store(target, gradient.to(dx.dtype.element_ty), mask=mask)
    column = tl.arange(0, columns)
    target = sums + block * sums_stride + column
    tl.store(target, tl.sum(of_rate, 0), mask=column < heads)
    tl.store(target + heads, tl.sum(of_bias, 0), mask=column < heads)
