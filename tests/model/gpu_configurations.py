"""Every configuration of the delta rule's kernels that Triton may choose, against the rule in float64, on CUDA.

Triton has miscompiled kernels of flash-linear-attention on Hopper, with some configurations only (decision 0063). So a
configuration is in the table of ``model/kernels/configurations.py`` only if it is right here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlmdata.model.families.qwen3_5.delta_rule import gated_delta_rule
from vlmdata.model.kernels.ahead import KernelsAhead
from vlmdata.model.kernels.configurations import CANDIDATES, HOPPER, autotuners, choose_configurations
from vlmdata.model.kernels.delta_rule import DeltaRule
from vlmdata.model.kernels.shapes import DecoderKernels, DeltaNetShape, Kernels
from vlmdata.model.parallel.packed import PackIndex

DEVICE = torch.device("cuda", 0)
#: Samples of one token, of whole chunks, of one token more, and long ones.
BOUNDS = np.array([0, 1, 65, 200, 1000, 1064, 1129, 2048, 4096])
#: Numbers of heads, for each of which Triton compiles other kernels.
NUMBERS = (8, 16, 32, 48)
WIDTH = 128
#: Largest relative error of a tensor that is rounded to bfloat16 on its way: it is 4e-3 where all is right.
ROUNDED = 0.01
#: Each configuration runs on this many inputs: a race may spare some.
INPUTS = 5


def configurations_agree() -> None:
    """Raises AssertionError if a configuration's result or gradients are further from float64 than the others'."""
    for heads in NUMBERS:
        print(f"  {heads} heads")
        agree(heads)


def agree(heads: int) -> None:
    """Tries all configurations with a number of heads."""
    length, longest = int(BOUNDS[-1]), int(np.diff(BOUNDS).max())
    shape = DeltaNetShape(length, heads, heads, WIDTH, WIDTH, taps=4)
    with KernelsAhead(Kernels(DecoderKernels(shape, None), None, None, every=False).command()) as compiling:
        compiling.wait(lambda said: print(f"  {said}"))
    choose_configurations(WIDTH, WIDTH, HOPPER)
    pack = PackIndex.of_boundaries(BOUNDS, BOUNDS, 1, 0).params(longest, 1, 0, DEVICE)
    cases = [drawn(length, heads, seed) for seed in range(INPUTS)]
    wanted = [exact(*case) for case in cases]
    usual = [errors(results(*case, pack), right) for case, right in zip(cases, wanted, strict=True)]
    print("  chosen by Triton: " + ", ".join(f"{error:.1e}" for error in np.max(usual, 0)))
    assert np.max(usual) < ROUNDED, usual
    for name, tuner, config in each_configuration():
        with only(tuner, config):
            found = [errors(results(*case, pack), right) for case, right in zip(cases, wanted, strict=True)]
        ratio = np.max(np.array(found) / np.array(usual))
        title = f"{name} {config.num_warps} warps, {config.num_stages} stages, {config.kwargs}"
        print(f"  {title}: ratio {ratio:.3f}")
        # Orders of summation differ between configurations, by far less than what bfloat16 rounds.
        assert ratio < 1.1, (title, found)


def each_configuration() -> Iterator[tuple[str, Any, Any]]:
    """The delta rule's kernels with their autotuners and each configuration of the table."""
    for name, tuner in autotuners().items():
        if name in CANDIDATES and not name.startswith(("causal_conv1d", "l2norm")):
            for config in list(tuner.configs):
                yield name, tuner, config


@contextlib.contextmanager
def only(tuner: Any, config: Any) -> Iterator[None]:
    """Leaves an autotuner no choice."""
    before, tuner.configs = tuner.configs, [config]
    tuner.cache.clear()
    try:
        yield
    finally:
        tuner.configs = before
        tuner.cache.clear()


def drawn(length: int, number: int, seed: int) -> tuple[list[Tensor], Tensor]:
    """Query, key, value, decay and beta, and a gradient of the result."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    heads = torch.randn(4, length, number, WIDTH, device=DEVICE, generator=generator)
    unit = torch.nn.functional.normalize(heads[:2], dim=-1)
    rates = torch.rand(2, length, number, device=DEVICE, generator=generator)
    inputs = [*unit.bfloat16(), heads[2].bfloat16(), -(rates[0] ** 4), rates[1].bfloat16()]
    return inputs, heads[3].bfloat16()


def results(inputs: list[Tensor], pull: Tensor, pack: Any) -> list[Tensor]:
    """The result of the kernels and its gradients."""
    leaves = [each.detach().requires_grad_() for each in inputs]
    out = DeltaRule.apply(*leaves, pack.cu_seqlens_q, pack.delta_chunks)
    return [out.detach(), *torch.autograd.grad(out, leaves, pull)]


def exact(inputs: list[Tensor], pull: Tensor) -> list[Tensor]:
    """The same in float64."""
    leaves = [each.double().requires_grad_() for each in inputs]
    out = gated_delta_rule(*leaves, BOUNDS.tolist())
    return [out.detach(), *torch.autograd.grad(out, leaves, pull.double())]


def errors(found: list[Tensor], right: list[Tensor]) -> list[float]:
    """Relative errors, for each tensor."""
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, right, strict=True)]
