"""Checks of single kernels on CUDA, for ``python -m tests.model.gpu_checks``, mostly against plain torch in float64."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator

import numpy as np
import torch

from tests.model.gpu_attention import tower_attention
from tests.model.gpu_configurations import configurations_agree
from tests.model.gpu_linear import host_times, layers_agree, whole_model_agrees
from tests.model.helpers import relative

CUDA = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def fused_rotations() -> None:
    """Transformer Engine's rotary kernel with angles of our own against the plain rotation in float32."""
    from vlmdata.model.network.attention import InterleavedMRoPE, _rotate_fused, rotate

    generator = torch.Generator(CUDA).manual_seed(0)
    positions = torch.randint(0, 4000, (3, 1, 1000), device=CUDA, generator=generator)
    angles = InterleavedMRoPE(64, 1e7)(positions, [11, 11, 10])
    x = torch.randn(1000, 1, 6, 256, device=CUDA, generator=generator)
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 4e-3)):
        results = []
        for function, kind in ((rotate, torch.float32), (_rotate_fused, dtype)):
            mine = x.to(dtype).to(kind).requires_grad_()
            out = function(mine, angles)
            factor = torch.linspace(-1, 1, out.numel(), device=CUDA).view(out.shape)
            results.append([out, *torch.autograd.grad((out.float() * factor).sum(), mine)])
        errors = [relative(b.float(), a.float()) for a, b in zip(*results, strict=True)]
        print(f"  {dtype}: {[f'{each:.1e}' for each in errors]}")
        assert max(errors) < limit


def tower_rotation() -> None:
    """The tower's rotation with a bias against torch in float64, twice with the same bits, for all numbers of rows."""
    from tests.model.kernels.rotation import compared
    from vlmdata.model.kernels.rotation import SplitAndRotate
    from vlmdata.model.kernels.shapes import TowerKernels

    # Rounding is that of the results: 2^-9 in bfloat16.
    for dtype, limit in ((torch.float32, 2e-6), (torch.bfloat16, 4e-3)):
        for heads, width in ((16, 64), (12, 64), (16, 72), (4, 64), (1, 72), (5, 12)):
            worst = 0.0
            frozen: list[tuple[str, ...]] = [(), *([("mixed",), ("bias",)] if heads == 12 else [])]
            for rows, fixed in itertools.product((0, 1, 37, 5000, 55_501), frozen):
                errors = compared(rows, heads, width, dtype, fixed, str(CUDA))
                assert max(errors.values()) < limit, (rows, heads, width, fixed, errors)
                worst = max(worst, *errors.values())
            print(f"  {heads} heads of {width}, {dtype}: {worst:.1e}")
    TowerKernels(16, 64, 768, 4096).run(str(CUDA))
    with nothing_compiled():
        for rows in (1, 16, 55_500, 60_001):
            shapes = [(rows, 16, 3, 64), (3072,), (rows, 64)]
            mixed, bias, turns = (torch.randn(shape, device=CUDA) for shape in shapes)
            inputs = [each.bfloat16().requires_grad_() for each in (mixed, bias)]
            runs = []
            for _ in range(2):
                found = SplitAndRotate.apply(*inputs, turns)
                runs.append([*found, *torch.autograd.grad(found, inputs, [each.detach() for each in found])])
            assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@contextlib.contextmanager
def nothing_compiled() -> Iterator[None]:
    """Fails if Triton compiles a kernel or loads one from its cache."""
    import triton

    compiled: list[str] = []
    triton.knobs.compilation.listener = lambda *, src, **_: compiled.append(src.name)
    try:
        yield
    finally:
        triton.knobs.compilation.listener = None
    assert not compiled, "another number of rows compiled kernels again"


def delta_net_kernels() -> None:
    """The kernels before the delta rule against plain torch in float64, and twice with the same bits."""
    from tests.model.kernels.delta_inputs import compared, drawn, starts_of
    from vlmdata.model.kernels.delta_inputs import DeltaInputs
    from vlmdata.model.kernels.short_convolution import DeltaHeads

    bounds = [0, 1, 2, 5, 300, 301, 555, 1024, 1040]
    cases = [
        (DeltaHeads(16, 16, 128, 128), 4),
        (DeltaHeads(16, 32, 128, 128), 4),
        (DeltaHeads(2, 6, 72, 40), 3),
        (DeltaHeads(1, 1, 256, 64), 4),
    ]
    for heads, taps in cases:
        # Rounding is that of the results: 2^-9 in bfloat16. Exponentials of a GPU are exact to about 2e-7.
        for dtype, limit in ((torch.float32, 2e-6), (torch.bfloat16, 4e-3)):
            errors = compared(bounds, heads, taps, dtype, device=str(CUDA), apart=16 if heads.key_width == 128 else 7)
            print(f"  {heads} {dtype}: " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
            assert max(errors.values()) < limit, errors
    heads, bounds = DeltaHeads(16, 16, 128, 128), [0, 5000, 5001, 16384]
    inputs = [each.to(CUDA).requires_grad_() for each in drawn(bounds[-1], heads, 4, torch.bfloat16, 0, 0)]
    runs = []
    for _ in range(3):
        found = DeltaInputs.apply(*inputs, starts_of(bounds, CUDA), heads)
        runs.append([*found, *torch.autograd.grad(found, inputs, [each.detach() for each in found])])
    assert all(torch.equal(a, b) for again in runs[1:] for a, b in zip(runs[0], again, strict=True))


def residual_norm() -> None:
    """The tower's residual stream against plain torch in float64, twice with the same bits, for all numbers of rows."""
    from tests.model.kernels.residual_norm import INPUTS, compared
    from vlmdata.model.kernels.residual_norm import sum_and_norm, sum_with_bias
    from vlmdata.model.kernels.shapes import TowerKernels

    # Rounding is that of the results: 2^-9 in bfloat16.
    for dtype, limit in ((torch.float32, 2e-6), (torch.bfloat16, 4e-3)):
        for width in (768, 1152, 72):
            worst = dict.fromkeys(INPUTS, 0.0)
            for function, names in INPUTS.items():
                frozen = [(), *([names[-1:], names[:-1]] if width == 768 else [])]
                for rows, fixed in itertools.product((0, 1, 37, 5000, 55_501), frozen):
                    errors = compared(function, rows, width, dtype, fixed, str(CUDA))
                    assert max(errors.values()) < limit, (function, rows, fixed, errors)
                    worst[function] = max(worst[function], *errors.values())
            print(f"  {width} {dtype}: " + ", ".join(f"{name} {error:.1e}" for name, error in worst.items()))
    generator = torch.Generator(CUDA).manual_seed(0)
    TowerKernels(16, 64, 768, 4096).run(str(CUDA))
    with nothing_compiled():
        for rows in (1, 16, 55_500, 60_001):
            shapes = [(rows, 768), (rows, 768), (768,), (768,), (768,)]
            tensors = [
                torch.randn(each, device=CUDA, generator=generator).bfloat16().requires_grad_() for each in shapes
            ]
            runs = []
            for _ in range(2):
                found = [*sum_and_norm(*tensors, 1e-6), sum_with_bias(*tensors[:3])]
                runs.append([*found, *torch.autograd.grad(found, tensors, [each.detach() for each in found])])
            assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def biased_gelu() -> None:
    """GELU with a bias against torch in float64, twice with the same bits, for all numbers of rows."""
    from tests.model.kernels.biased_gelu import compared
    from vlmdata.model.kernels.biased_gelu import gelu_with_bias
    from vlmdata.model.kernels.shapes import TowerKernels

    # Rounding is that of the results: 2^-9 in bfloat16.
    for dtype, limit in ((torch.float32, 2e-6), (torch.bfloat16, 4e-3)):
        for width in (4096, 4304, 72):
            worst = 0.0
            frozen: list[tuple[str, ...]] = [(), *([("product",), ("bias",)] if width == 4096 else [])]
            for rows, fixed in itertools.product((0, 1, 37, 5000, 55_501), frozen):
                errors = compared(rows, width, dtype, fixed, str(CUDA))
                assert max(errors.values()) < limit, (rows, width, fixed, errors)
                worst = max(worst, *errors.values())
            print(f"  {width} {dtype}: {worst:.1e}")
    generator = torch.Generator(CUDA).manual_seed(0)
    TowerKernels(16, 64, 768, 4096).run(str(CUDA))
    with nothing_compiled():
        for rows in (1, 16, 55_500, 60_001):
            product, bias = (
                torch.randn(shape, device=CUDA, generator=generator).bfloat16().requires_grad_()
                for shape in ((rows, 4096), (4096,))
            )
            runs = []
            for _ in range(2):
                out = gelu_with_bias(product, bias)
                runs.append([out, *torch.autograd.grad(out, (product, bias), out.detach())])
            assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def attention_inputs() -> None:
    """The kernel before attention against plain torch in float64, and again with the same bits."""
    from tests.model.kernels.attention_inputs import compared, drawn
    from vlmdata.model.kernels.attention_inputs import AttentionHeads, AttentionInputs

    # Groups, queries of a group, width, rotated columns: Qwen3.5, Qwen3-VL, six queries, narrow heads, no powers of 2.
    layouts = [(2, 4, 256, 64), (8, 2, 128, 128), (4, 6, 256, 64), (1, 8, 64, 32), (3, 1, 24, 12)]
    for (*shape, rotated), gated in itertools.product(layouts, (True, False)):
        heads = AttentionHeads(*shape, gated=gated, zero_centered=gated, eps=1e-6)
        # Rounding is that of the results: 2^-9 in bfloat16. Sums of the weights' gradients have 1,037 terms a query.
        for dtype, limit in ((torch.float32, 2e-6), (torch.bfloat16, 4e-3)):
            errors = compared(1037, heads, rotated, dtype, str(CUDA))
            print(f"  {heads} {dtype}: " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
            assert max(errors.values()) < limit, errors
    heads = AttentionHeads(2, 4, 256, gated=True, zero_centered=True, eps=1e-6)
    mixed, angles, *weights = drawn(16384, heads, 64, torch.bfloat16, str(CUDA))
    runs = []
    for _ in range(3):
        found = AttentionInputs.apply(mixed, angles, *weights, heads)
        runs.append([*found, *torch.autograd.grad(found, [mixed, *weights], [each.detach() for each in found])])
    assert all(torch.equal(a, b) for again in runs[1:] for a, b in zip(runs[0], again, strict=True))


def delta_rule() -> None:
    """Our call of flash-linear-attention's kernels against its own function."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    from vlmdata.model.kernels.delta_rule import DeltaRule
    from vlmdata.model.parallel.packed import PackIndex

    bounds = np.array([0, 1, 65, 200, 1000, 1064, 2048])
    packed = PackIndex.of_boundaries(bounds, bounds, 1, 0).params(984, 1, 0, CUDA)
    generator = torch.Generator(CUDA).manual_seed(0)
    heads = torch.randn(3, 2048, 8, 128, device=CUDA, generator=generator)
    unit = torch.nn.functional.normalize(heads[:2], dim=-1)
    rates = torch.rand(2, 2048, 8, device=CUDA, generator=generator)
    pull = torch.randn(2048, 8, 128, device=CUDA, generator=generator).bfloat16()
    tensors = [*unit.bfloat16(), heads[2].bfloat16(), -rates[0], rates[1].bfloat16()]
    tensors = [each.detach().clone().requires_grad_() for each in tensors]
    query, key, value, decay, beta = (each[None] for each in tensors)
    theirs, _ = chunk_gated_delta_rule(query, key, value, g=decay, beta=beta, cu_seqlens=packed.cu_seqlens_q)
    wanted = theirs[0], *torch.autograd.grad(theirs[0], tensors, pull)
    runs = []
    for keep in (False, True):
        ours = DeltaRule.apply(*tensors, packed.cu_seqlens_q, packed.delta_chunks, keep)
        runs.append([ours, *torch.autograd.grad(ours, tensors, pull)])
        errors = [relative(a, b) for a, b in zip(runs[-1], wanted, strict=True)]
        print(f"  states {'kept' if keep else 'computed again'}: relative differences {errors}")
        assert max(errors) < 1e-3
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


#: Checks by name.
KERNELS: dict[str, Callable[[], None]] = {
    "fused rotations": fused_rotations,
    "tower rotation": tower_rotation,
    "tower attention": tower_attention,
    "attention inputs": attention_inputs,
    "delta net's kernels": delta_net_kernels,
    "residual norm": residual_norm,
    "biased gelu": biased_gelu,
    "delta rule": delta_rule,
    "delta rule, each configuration": configurations_agree,
    "linear layers, layers": layers_agree,
    "linear layers, host times": host_times,
    "linear layers, whole model": whole_model_agrees,
}
