"""The kernels of the residual stream equal plain code in float64, in Triton's interpreter on the CPU."""

from __future__ import annotations

import random
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.model.helpers import make_sample, pack, relative, small_architecture, weights_of
from tests.model.kernels.interpreter import accept_scalar_bounds
from tests.model.kernels.residual_norm import INPUTS, compared

#: Errors that rounding allows. The interpreter cuts bfloat16 off: up to 2^-8.
LIMITS = {torch.float32: 1e-6, torch.bfloat16: 5e-3}


def interpreted() -> None:
    from vlmdata.model.kernels import residual_norm
    from vlmdata.model.kernels.residual_norm import Tiling

    accept_scalar_bounds()
    chosen = random.Random(1)
    default = residual_norm.FORWARD, residual_norm.BACKWARD, residual_norm.OF_BIAS
    cases = [(5, 768), (3, 1024), (2, 1152), (0, 64), (1, 1)]
    cases += [(chosen.randint(1, 40), chosen.randint(2, 300)) for _ in range(3)]
    for number, (rows, width) in enumerate(cases):
        # Few programs have several tiles each, the last ones in part or not at all.
        few = tuple(Tiling(2 ** chosen.randint(0, 3), 256, chosen.randint(1, 4)) for _ in range(3))
        tilings = default if number % 2 else few
        residual_norm.FORWARD, residual_norm.BACKWARD, residual_norm.OF_BIAS = tilings
        for dtype, limit in LIMITS.items():
            for function in INPUTS:
                errors = compared(function, rows, width, dtype)
                # A row of one column is normalised to its shift: gradients of 0, which have no relative error.
                judged = errors if width > 1 else {name: errors[name] for name in ("s", "normed") if name in errors}
                assert max(judged.values()) < limit, (function, rows, width, dtype, tilings, errors)


def with_frozen_inputs() -> None:
    """All combinations of inputs without a gradient but that of all."""
    accept_scalar_bounds()
    for function, names in INPUTS.items():
        for count in range(1, len(names)):
            for frozen in combinations(names, count):
                errors = compared(function, 7, 24, torch.float32, frozen)
                assert max(errors.values()) < LIMITS[torch.float32], (function, frozen, errors)


def in_the_stream() -> None:
    """Both kinds of a stream give the same, wait for weights alike, and leave gradients alone that they share."""
    accept_scalar_bounds()
    from vlmdata.model.network.residual import KernelResidual, PlainResidual, residual

    engine: Any = SimpleNamespace(transformer_impl="transformer_engine")
    plain: Any = SimpleNamespace(transformer_impl="local")
    kinds = residual(plain, 1e-3), residual(engine, 1e-3)
    assert [type(each) for each in kinds] == [PlainResidual, KernelResidual]
    generator = torch.Generator().manual_seed(2)
    norms = [torch.nn.LayerNorm(24, eps=1e-3) for _ in range(2)]
    calls: list[Any] = []
    for norm in norms:
        torch.nn.init.normal_(norm.weight, generator=generator)
        torch.nn.init.normal_(norm.bias, generator=generator)
        norm.register_forward_pre_hook(lambda module, *_: calls.append(module))  # as the distributed optimizer's
    x, weight, bias = (torch.randn(each, generator=generator) for each in ((11, 24), (24, 24), (24,)))
    inputs = [each.requires_grad_() for each in (x, weight, bias)]
    parameters = [each for norm in norms for each in norm.parameters()]
    results: list[list[Tensor]] = []
    for kind in kinds:
        stream, normed = kind.keep_and_norm(x, norms[0])
        stream, normed = kind.sum_and_norm(stream, (normed @ weight, bias), norms[1])
        out = kind.sum(stream, ((normed @ weight).tanh(), bias))
        out = kind.sum(out, (stream, bias))  # a tensor that is used twice: its gradients are added in place
        results.append([out, *torch.autograd.grad(out, [*inputs, *parameters], out.detach().sin())])
    assert calls == norms * 2
    for a, b in zip(*results, strict=True):
        assert relative(b, a) < 2e-6


def in_the_tower() -> None:
    """A model with deepstack gives the same with the kernels: also recomputed, fully sharded, and with frozen parts."""
    accept_scalar_bounds()
    from vlmdata.model.families import spec_of
    from vlmdata.model.network.residual import KernelResidual
    from vlmdata.model.network.settings import ModelSettings
    from vlmdata.model.network.vision_attention import _attend, _split_and_rotate
    from vlmdata.model.parallel import cpu_mode, groups
    from vlmdata.model.parallel.sharding import shard_parameters
    from vlmdata.model.weight_names.table import load_from_hf

    class RotatingAttention(torch.nn.Module):
        def forward(self, mixed_pn3d: Tensor, bias: Tensor, images: Any) -> Tensor:
            return _attend(*_split_and_rotate(mixed_pn3d, bias, images), images.bounds)

    torch.set_num_threads(1)
    groups.initialize(backend="gloo")
    wanted = small_architecture("qwen3_vl")
    weights, maps = weights_of(wanted), spec_of(wanted).parameter_maps(wanted)
    samples = pack([make_sample(1, [(4, 4)], 20), make_sample(2, [(2, 2)], 5)])

    def gradients(kernels: bool, frozen: str = "none", recompute: bool = False, sharded: bool = False) -> Any:
        built: Any = spec_of(wanted).build(wanted, ModelSettings(vision_recompute=recompute))
        load_from_hf(built, maps, lambda source: source.take(weights[source.name]))
        for name, parameter in built.train().named_parameters():
            parameter.requires_grad = frozen not in name
        for block in built.vision.blocks if kernels else ():
            block.residual = KernelResidual(wanted.vision.layer_norm_eps)
            block.core_attention = RotatingAttention()
        if sharded:
            shard_parameters(built, torch.float32, torch.device("cpu"))
        losses = built(samples)
        losses.sum().backward()
        found = {name: each.grad for name, each in built.vision.named_parameters() if each.requires_grad}
        return {name: each.to_local() if sharded else each for name, each in found.items()} | {"loss": losses}

    with cpu_mode.cpu_mode_if_needed():
        plain = gradients(False)
        cases: list[dict[str, Any]] = [{"recompute": True, "sharded": True}, {"frozen": "vision.blocks"}]
        cases += [{"frozen": "norm"}, {"frozen": "blocks.1", "recompute": True}]
        for case in cases:
            found = gradients(True, **case)
            assert set(found) == {name for name in plain if case.get("frozen", "none") not in f"vision.{name}"}
            errors = {name: relative(each, plain[name]) for name, each in found.items()}
            assert max(errors.values()) < 2e-5, (case, errors)
    groups.destroy()
