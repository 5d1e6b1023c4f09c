"""The kernels of a decoder's residual stream equal plain code in float64, in Triton's interpreter on the CPU."""

from __future__ import annotations

import random
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from tests.model.helpers import make_sample, pack, relative, small_architecture, weights_of
from tests.model.kernels.interpreter import accept_scalar_bounds
from tests.model.kernels.residual_rms_norm import INPUTS, compared

#: Errors that rounding allows. The interpreter cuts bfloat16 off: up to 2^-8.
LIMITS = {torch.float32: 1e-6, torch.bfloat16: 6e-3}


def interpreted() -> None:
    from model.kernels import residual_rms_norm
    from model.kernels.residual_norm import Tiling

    accept_scalar_bounds()
    chosen = random.Random(1)
    default = residual_rms_norm.FORWARD, residual_rms_norm.BACKWARD
    cases: list[tuple[int, ...]] = [(5, 1, 2048), (3, 1024), (1, 1, 2560), (2, 5120), (0, 1, 64), (1, 1), (90, 1, 40)]
    cases += [(chosen.randint(1, 70), chosen.randint(2, 300)) for _ in range(4)]
    for number, shape in enumerate(cases):
        # Few programs have several tiles each, the last ones in part or not at all.
        few = tuple(Tiling(2 ** chosen.randint(0, 3), 256, chosen.randint(1, 4)) for _ in range(2))
        tilings = default if number % 2 == 0 else few
        residual_rms_norm.FORWARD, residual_rms_norm.BACKWARD = tilings
        residual_rms_norm._SUMMED_PARTS = chosen.choice((2, 128))  # fewer than programs, and more
        for dtype, limit in LIMITS.items():
            for function in INPUTS:
                errors = compared(function, shape, number % 3 > 0, dtype)
                # In rows of one column, gradients of the norm cancel out but for eps.
                judged = errors if shape[-1] > 1 else {name: errors[name] for name in ("s", "normed")}
                assert max(judged.values()) < limit, (function, shape, dtype, tilings, errors)


def with_frozen_inputs() -> None:
    """All combinations of inputs without a gradient but that of all."""
    accept_scalar_bounds()
    for function, names in INPUTS.items():
        for count in range(1, len(names)):
            for frozen in combinations(names, count):
                errors = compared(function, (7, 24), True, torch.float32, frozen)
                assert max(errors.values()) < LIMITS[torch.float32], (function, frozen, errors)


def in_the_model() -> None:
    """Decoders compute the same with the kernels in their layers: with gradients, recomputed, frozen, and without."""
    accept_scalar_bounds()
    from model.families import spec_of
    from model.network import assembly, decoder_layer, linear
    from model.network.attention import RotatedSelfAttention
    from model.network.fused_layer import FusedLayer
    from model.network.settings import ModelSettings
    from model.parallel import cpu_mode, groups
    from model.weights.mapping import load_from_hf
    from tests.model.kernels.norm_linear import NormLinearProvider
    from tests.model.network.test_linear import PlainEngine

    torch.set_num_threads(1)
    groups.initialize(backend="gloo")
    engine, normed = PlainEngine(), []
    plain_norm = engine.norm
    engine.norm = lambda *inputs: normed.append(1) or plain_norm(*inputs)  # type: ignore[method-assign, func-returns-value]
    linear.engine = lambda: engine  # type: ignore[assignment]
    assembly.provider_of = lambda *_: NormLinearProvider()
    decoder_layer.KernelSelfAttention = RotatedSelfAttention  # type: ignore[misc, assignment]
    samples = pack([make_sample(1, [(2, 2)], 3), make_sample(2, [], 3)])

    def arriving(linear: Any, awaited: list[Any]) -> Any:
        """A hook like the distributed optimizer's: the norm's weight is there only once it was called."""
        there = linear.layer_norm_weight.detach().clone()
        linear.layer_norm_weight.data.fill_(float("nan"))

        def hook(module: Any, *_: Any) -> None:
            if module not in awaited:
                module.layer_norm_weight.data.copy_(there)
            awaited.append(module)

        return hook

    def results(
        family: str, fused: bool, frozen: str = "none", moe: bool = False, expected: bool = True, **settings: Any
    ) -> dict[str, Tensor]:
        wanted = small_architecture(family, moe=moe)
        weights, maps = weights_of(wanted), spec_of(wanted).parameter_maps(wanted)
        built: Any = spec_of(wanted).build(wanted, ModelSettings(**settings)).train()
        load_from_hf(built, maps, lambda source: source.take(weights[source.name]))
        for name, parameter in built.named_parameters():
            parameter.requires_grad = frozen not in name
        layers = [each for each in built.modules() if isinstance(each, FusedLayer)]
        assert len(layers) == 4 + (family == "qwen3_5"), "one predicts further tokens"
        for each in layers:
            each.may_fuse = None if fused else False
        awaited: list[Any] = []
        for layer in layers if fused and expected else ():
            for each in layer._linears():
                each.register_forward_pre_hook(arriving(each, awaited))
        normed.clear()
        losses = built(samples)
        if fused:
            assert all(each.may_fuse is expected for each in layers)
            assert bool(normed) != expected or moe, "layers took the other way"
            counts = {awaited.count(each) for each in awaited}
            assert counts <= {2}, "a norm did not wait for its weight"
        losses.sum().backward()
        found = {name: each.grad for name, each in built.named_parameters() if each.grad is not None}
        with torch.no_grad():
            return found | {"loss": losses, "without gradients": built(samples)}

    def agree(family: str, **case: Any) -> None:
        wanted, found = (results(family, fused, **case) for fused in (False, True))
        assert found.keys() == wanted.keys()
        errors = {name: relative(each, wanted[name]) for name, each in found.items() if wanted[name].any()}
        assert max(errors.values()) < 2e-5, (family, case, max(errors, key=lambda name: errors[name]), errors)
        name = "language.decoder.layers.0.mlp.linear_fc1.layer_norm_weight"
        assert (name in found) == ("frozen" not in case)

    with cpu_mode.cpu_mode_if_needed():
        agree("qwen3_5")
        agree("qwen3_5", frozen="norm")
        agree("qwen3_vl", recompute="full")
        results("qwen3_5", True, expected=False, recompute="selective")
        results("qwen3_vl", True, expected=False, moe=True)
    groups.destroy()
