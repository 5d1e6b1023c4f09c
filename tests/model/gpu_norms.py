"""Checks of a decoder's norms on CUDA, for ``python -m tests.model.gpu_checks``."""

from __future__ import annotations

import itertools
import os
from typing import Any

import torch
from torch import Tensor

from tests.model.helpers import relative

CUDA = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def residual_rms_norm() -> None:
    """A decoder's residual stream against torch in float64, twice with the same bits, for all numbers of rows."""
    from model.kernels.residual_rms_norm import keep_and_rms_norm, run_residual_rms_norm, sum_and_rms_norm
    from tests.model.gpu_kernels import nothing_compiled
    from tests.model.kernels.residual_rms_norm import INPUTS, compared

    # Rounding is that of the results: 2^-9 in bfloat16.
    for dtype, limit in ((torch.float32, 2e-6), (torch.bfloat16, 4e-3)):
        for width, zero_centered in (
            (1024, True),
            (2048, True),
            (2048, False),
            (2560, True),
            (4096, False),
            (5120, True),
        ):
            worst = dict.fromkeys(INPUTS, 0.0)
            for function, names in INPUTS.items():
                frozen = [(), *([names[-1:], names[:-1]] if width == 1024 else [])]
                for rows, fixed in itertools.product((0, 1, 37, 5000, 16_385), frozen):
                    errors = compared(function, (rows, 1, width), zero_centered, dtype, fixed, str(CUDA))
                    assert max(errors.values()) < limit, (function, rows, width, fixed, errors)
                    worst[function] = max(worst[function], *errors.values())
            print(f"  {width} {dtype}: " + ", ".join(f"{name} {error:.1e}" for name, error in worst.items()))
    generator = torch.Generator(CUDA).manual_seed(0)
    run_residual_rms_norm(2048, True, str(CUDA))
    with nothing_compiled():
        for rows in (1, 16, 16_384, 20_001):
            shapes = [(rows, 1, 2048), (rows, 1, 2048), (2048,)]
            tensors = [
                torch.randn(each, device=CUDA, generator=generator).bfloat16().requires_grad_() for each in shapes
            ]
            runs = []
            for _ in range(2):
                found = [
                    *sum_and_rms_norm(*tensors, 1e-6, zero_centered=True),
                    *keep_and_rms_norm(tensors[0], tensors[2], 1e-6, zero_centered=True),
                ]
                runs.append([*found, *torch.autograd.grad(found, tensors, [each.detach() for each in found])])
            assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def fused_layers() -> None:
    """Small models with and without fused layers: they differ by rounding. Also recomputed, and without gradients."""
    from model.families import spec_of
    from model.network.fused_layer import FusedLayer
    from model.network.settings import ModelSettings
    from tests.model.gpu_checks import architecture, batch, with_weights

    cases = [*itertools.product(("qwen3_5", "qwen3_vl"), ("none", "full", "selective"), (False,))]
    for family, recompute, summed in [*cases, ("qwen3_5", "none", True), ("qwen3_5", "full", True)]:
        wanted = architecture(family=family)
        settings: Any = ModelSettings(
            backend="transformer_engine", precision="bf16", recompute=recompute, gradient_accumulation_fusion=summed
        )
        model: Any = with_weights(spec_of(wanted).build(wanted, settings), wanted)
        layers = [each for each in model.modules() if isinstance(each, FusedLayer)]
        packed = batch().to(CUDA)
        runs: list[dict[str, Tensor]] = []
        for allowed in (False, False, None):
            for each in layers:
                each.may_fuse = allowed
            model.zero_grad()
            for each in model.parameters() if summed else ():  # as megatron-core's buffers
                each.main_grad = torch.zeros_like(each, dtype=torch.float32)
            losses = model(packed)
            losses.sum().backward()
            with torch.no_grad():
                found = {"losses": losses.detach(), "without gradients": model(packed)}
            found |= {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
            sums = {name: each.main_grad for name, each in model.named_parameters() if summed}
            runs.append(found | {f"{name}.main_grad": each for name, each in sums.items()})
        assert {each.may_fuse for each in layers} == {recompute != "selective"}
        first, repeated, fused = runs
        assert first.keys() == fused.keys()  # cuDNN's attention does not repeat its bits
        errors = {name: relative(fused[name], first[name]) for name in first if first[name].any()}
        noise = {name: relative(repeated[name], first[name]) for name in errors}
        ordered = sorted(errors, key=lambda name: errors[name], reverse=True)[:3]
        print(
            f"  {family}, recompute {recompute}, summed {summed}: "
            + ", ".join(f"{name} {errors[name]:.1e}" for name in ordered)
        )
        for name, error in errors.items():
            assert error < max(4 * noise[name], 3e-2), (name, noise[name], error)
        assert errors["losses"] < 5e-3
