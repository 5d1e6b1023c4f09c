"""Checks of linear layers on CUDA, for ``python -m tests.model.gpu_checks``: both ways give the same bits."""

from __future__ import annotations

import copy
import itertools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.model.helpers import relative

CUDA = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def layers(dtype: torch.dtype, width: int, out: int) -> Iterator[tuple[str, Any, type]]:
    """Every kind of layer with random weights: its name, the layer, and Transformer Engine's class of it."""
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelLinear,
        TELayerNormColumnParallelLinear,
        TERowParallelLinear,
    )
    from megatron.core.parallel_state import get_tensor_model_parallel_group

    from tests.model.gpu_models import architecture
    from vlmdata.model.families.qwen3_5.build import language_config
    from vlmdata.model.network.linear import ShortLinear, ShortNormLinear, with_short_way
    from vlmdata.model.network.settings import ModelSettings

    settings = ModelSettings(backend="transformer_engine", precision="fp32" if dtype == torch.float32 else "bf16")
    config = language_config(architecture(), settings)
    plain = copy.copy(config)
    plain.layernorm_zero_centered_gamma = False
    column, row = {"gather_output": False}, {"input_is_parallel": True}
    common: dict[str, Any] = {"init_method": config.init_method, "is_expert": False}
    common["tp_group"] = get_tensor_model_parallel_group()
    kinds = [
        ("norm and column", TELayerNormColumnParallelLinear, config, column),
        ("norm (weight itself) and column", TELayerNormColumnParallelLinear, plain, column),
        ("column", TEColumnParallelLinear, config, column),
        ("row", TERowParallelLinear, config, row),
    ]
    for (name, kind, of_kind, own), (bias, skip) in itertools.product(
        kinds, ((False, True), (True, False), (True, True))
    ):
        way = ShortNormLinear if kind is TELayerNormColumnParallelLinear else ShortLinear
        layer = with_short_way(kind, way)(width, out, config=of_kind, bias=bias, skip_bias_add=skip, **own, **common)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        yield f"{name}, bias {'added later' if skip and bias else bias}", layer, kind


def results(layer: Any, forward: Callable[[Tensor], Any], x: Tensor, fused: bool, first: bool) -> dict[str, Any]:
    """Output and gradients of one way; gradients of the weight go to ``main_grad`` if ``fused``."""
    layer.zero_grad()
    layer.is_first_microbatch, layer.fuse_wgrad_accumulation = first, fused
    if fused:
        layer.weight.main_grad = torch.full_like(layer.weight, 0.5, dtype=torch.float32)
        layer.weight.grad_added_to_main_grad = False
    x = x.detach().clone().requires_grad_()
    out, bias = forward(x)
    pull = torch.linspace(-1, 1, out.numel(), device=CUDA).to(out.dtype)
    pull = pull.view(out.shape[::-1]).permute(*reversed(range(out.dim())))  # not contiguous
    torch.autograd.backward([out] if bias is None else [out, bias.sum()], [pull] if bias is None else [pull, None])
    found = {"out": out.detach(), "bias returned": bias, "x": x.grad}
    found |= {name: each.grad for name, each in layer.named_parameters()}
    if fused:
        assert layer.weight.grad_added_to_main_grad
        assert layer.weight.grad.dtype == layer.weight.dtype
        found |= {"weight": None, "main_grad": layer.weight.main_grad}
    return found


def different(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Names of tensors that have other bits."""
    assert found.keys() == wanted.keys()
    pairs = ((name, found[name], wanted[name]) for name in wanted)
    return [name for name, a, b in pairs if (a is None) != (b is None) or (a is not None and not torch.equal(a, b))]


def layers_agree() -> None:
    """Each kind of layer against Transformer Engine's own way of the same layer: equal outputs and gradients."""
    for dtype, (shape, out) in itertools.product(
        (torch.bfloat16, torch.float32), (((2048, 1, 1024), 3072), ((1000, 768), 2304), ((37, 1, 256), 512))
    ):
        generator = torch.Generator(CUDA).manual_seed(0)
        x = torch.randn(shape, device=CUDA, generator=generator).to(dtype)
        for name, layer, kind in layers(dtype, shape[-1], out):

            def long(x: Tensor, layer: Any = layer, kind: type = kind) -> Any:
                return kind.forward(layer, x)

            def again(x: Tensor, layer: Any = layer) -> Any:
                return checkpoint(layer, x, use_reentrant=False)

            for fused, first in ((False, False), (True, True), (True, False)):
                wanted = results(layer, long, x, fused, first)
                repeated = results(layer, long, x, fused, first)
                assert not different(repeated, wanted), f"{name}: Transformer Engine's own results are not repeatable"
                found = results(layer, layer, x, fused, first)
                assert layer.may_go_short
                assert not different(found, wanted), (name, dtype, shape, fused, first, different(found, wanted))
                found = results(layer, again, x, fused, first)
                assert not different(found, wanted), (name, "recomputed", different(found, wanted))
            with torch.no_grad():
                assert torch.equal(layer(x)[0], long(x)[0])
            for parameter in (layer.weight, *([layer.bias] if layer.use_bias else [])):
                parameter.requires_grad_(False)
            frozen = [results(layer, way, x, False, False) if not layer.te_return_bias else {} for way in (layer, long)]
            assert not different(*frozen), (name, "frozen", different(*frozen))
        print(f"  {dtype} {shape} -> {out}: equal")


def host_times(calls: int = 200) -> None:
    """Prints what a call of either way takes the host, forward and backward, without waiting for the GPU."""
    for name, layer, kind in layers(torch.bfloat16, 1024, 1024):
        layer.fuse_wgrad_accumulation = True
        layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
        layer.weight.grad_added_to_main_grad = False
        for parameter in layer.parameters():  # as megatron-core's hook
            parameter.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None))
        times: dict[str, tuple[float, float]] = {}
        for way, forward in (("long", lambda x, of=layer, kind=kind: kind.forward(of, x)), ("short", layer)):
            for number in (20, calls):
                inputs = [torch.randn(64, 1, 1024, device=CUDA).bfloat16().requires_grad_() for _ in range(number)]
                torch.cuda.synchronize()
                begun = time.perf_counter()
                outputs = [forward(x)[0] for x in inputs]
                middle = time.perf_counter()
                torch.cuda.synchronize()
                pulls = [torch.ones_like(each) for each in outputs]
                torch.cuda.synchronize()
                start = time.perf_counter()
                torch.autograd.backward(outputs, pulls)
                stop = time.perf_counter()
                times[way] = ((middle - begun) / number * 1e6, (stop - start) / number * 1e6)
        both = "; ".join(f"{way} {there:.0f} forward, {back:.0f} backward" for way, (there, back) in times.items())
        print(f"  {name}: µs per call: {both}")


def whole_model_agrees() -> None:
    """A small model both ways: losses and gradients differ by no more than in a repetition of the long way.

    cuDNN's attention adds up gradients in another order each time. Where one repetition has the same bits, another need
    not.
    """
    from tests.model.gpu_models import architecture, batch, with_weights
    from vlmdata.model.families import spec_of
    from vlmdata.model.network.linear import ShortLinear
    from vlmdata.model.network.settings import ModelSettings

    for family, fused in itertools.product(("qwen3_5", "qwen3_vl"), (False, True)):
        wanted = architecture(family=family)
        settings = ModelSettings(
            backend="transformer_engine",
            precision="bf16",
            vision_attention="transformer_engine",
            gradient_accumulation_fusion=fused,
        )
        model = with_weights(spec_of(wanted).build(wanted, settings), wanted)
        linears = [each for each in model.modules() if isinstance(each, ShortLinear)]
        packed = batch().to(CUDA)
        runs: list[dict[str, Tensor]] = []
        for allowed in (False, False, None):
            for each in linears:
                each.may_go_short = allowed
                each.weight.main_grad = torch.zeros_like(each.weight, dtype=torch.float32)  # type: ignore[union-attr]
            model.zero_grad()
            losses = model(packed)
            losses.sum().backward()
            gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
            sums = {
                f"{name}.main_grad": each.main_grad
                for name, each in model.named_parameters()
                if fused and hasattr(each, "main_grad")
            }
            runs.append({"losses": losses.detach()} | gradients | sums)
        assert any(each.may_go_short for each in linears)
        assert {each.may_go_short for each in linears} <= {True, None}, "a layer goes the long way"
        first, repeated, short = runs
        unstable, other = different(repeated, first), different(short, first)
        print(
            f"  {family}, fused {fused}: {len(first)} tensors, {len(unstable)} differ between runs, {len(other)} ways"
        )
        for name in other:
            noise, error = relative(repeated[name], first[name]), relative(short[name], first[name])
            assert error < 4 * max(noise, 1e-3), (name, noise, error)
