"""The Triton kernels before the delta rule equal the plain code in float64, in Triton's interpreter on the CPU."""

from __future__ import annotations

import contextlib
import dataclasses
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from tests.model.helpers import relative

#: Error of a result, relative to its norm.
LIMITS = {torch.float32: 2e-6, torch.bfloat16: 1e-2}  # the interpreter cuts off what a GPU rounds


def interpreted() -> None:
    from tests.model.kernels.delta_inputs import compared
    from vlmdata.model.kernels import decay, delta_inputs, short_convolution
    from vlmdata.model.kernels.short_convolution import DeltaHeads

    every_rate()
    # The interpreter is slow: with blocks of 8 tokens, few tokens have several. Shrinking would take minutes.
    delta_inputs.BLOCK = short_convolution.BLOCK = decay._TILE = 8

    @settings(max_examples=5, deadline=None, database=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
    # A block with nothing but the middle of a sample, then samples that begin shortly before a block.
    @example([5, 1, 14], DeltaHeads(1, 1, 8, 8), 4, torch.float32, 0)
    @example([6, 9, 3], DeltaHeads(1, 1, 8, 8), 4, torch.float32, 0)
    @example([1, 1, 1], DeltaHeads(2, 4, 128, 128), 4, torch.bfloat16, 16)
    @example([9], DeltaHeads(1, 3, 256, 64), 4, torch.float32, 0)
    @example([2, 3], DeltaHeads(1, 2, 8, 8), 1, torch.float32, 3)
    @given(
        st.lists(st.integers(1, 9), min_size=1, max_size=3),
        st.builds(
            lambda keys, repeats, key, value: DeltaHeads(keys, keys * repeats, key, value),
            st.integers(1, 2),
            st.integers(1, 3),
            st.sampled_from([8, 16, 24, 72]),
            st.sampled_from([8, 16, 40]),
        ),
        st.integers(1, 4),
        st.sampled_from([torch.float32, torch.bfloat16]),
        st.sampled_from([0, 7, 16]),
    )
    def equal(lengths: list[int], heads: DeltaHeads, taps: int, dtype: torch.dtype, apart: int) -> None:
        bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        errors = compared(bounds, heads, taps, dtype, seed=len(lengths), apart=apart)
        assert max(errors.values()) < LIMITS[dtype], errors

    equal()


def every_rate() -> None:
    """Decays are exact for small and large alpha, value by value."""
    from vlmdata.model.kernels.decay import decays

    alpha = torch.linspace(-60, 60, 4001)[:, None]
    decay, beta = decays(torch.cat([alpha, alpha], 1), torch.zeros(1), torch.zeros(1))
    torch.testing.assert_close(decay.double(), -F.softplus(alpha.double(), threshold=100), rtol=1e-6, atol=0)
    torch.testing.assert_close(beta.double(), alpha.double().sigmoid(), rtol=1e-6, atol=0)


def in_the_model() -> None:
    """A whole model with the kernels' layer against the same with the torch back end's: loss and all gradients."""
    from megatron.core.tensor_parallel import random

    from tests.model.helpers import make_sample, pack, small_architecture, weights_of
    from vlmdata.model.families import spec_of
    from vlmdata.model.families.qwen3_5 import gated_delta_net
    from vlmdata.model.families.qwen3_5.delta_rule import gated_delta_rule
    from vlmdata.model.network.settings import ModelSettings
    from vlmdata.model.parallel import cpu_mode, groups
    from vlmdata.model.weight_names.table import load_from_hf

    def rule(_: Any, *inputs: torch.Tensor) -> torch.Tensor:  # flash-linear-attention's needs CUDA
        *tensors, pack = inputs
        return gated_delta_rule(*tensors, pack.bounds)

    gated_delta_net.KernelGatedDeltaNet._rule = rule
    # Its recomputation asks Transformer Engine, which needs CUDA.
    random.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)
    random.activation_recompute_forward = random.fp8_autocast = lambda **_: contextlib.nullcontext()
    # And it compiles a function with all of torch's headers, where two are enough: 5 s of CPU time, not 16.
    everything, enough = "#include <torch/extension.h>", ("torch/csrc/Exceptions.h", "torch/csrc/utils/pybind.h")
    assert everything in random._SHARE_STORAGE_SRC
    includes = "\n".join(f"#include <{header}>" for header in enough)
    random._SHARE_STORAGE_SRC = random._SHARE_STORAGE_SRC.replace(everything, includes)
    random.load_inline = partial(random.load_inline, no_implicit_headers=True)
    groups.initialize(backend="gloo")
    wanted = small_architecture()  # with fewer heads: the interpreter goes through them one by one
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    wanted = dataclasses.replace(wanted, language=dataclasses.replace(wanted.language, **heads))
    packed = pack([make_sample(1, [(2, 2)], 6), make_sample(2, [], 4)], alignment=4, tail=4)
    weights = weights_of(wanted)
    outcomes = []
    with cpu_mode.cpu_as_cuda():
        model = spec_of(wanted).build(wanted, ModelSettings())
        load_from_hf(model, spec_of(wanted).parameter_maps(wanted), lambda source: source.take(weights[source.name]))
        nets = [each for each in model.modules() if isinstance(each, gated_delta_net.TorchGatedDeltaNet)]
        for recomputed in (None, False, True):
            for number, net in enumerate(nets):
                own = recomputed is not None and number == 0  # one layer: the interpreter is slow
                net.__class__ = gated_delta_net.KernelGatedDeltaNet if own else gated_delta_net.TorchGatedDeltaNet
                if own:
                    net.recompute_norm_out = recomputed
            model.zero_grad()
            losses = model(packed)
            losses.sum().backward()
            gradients = {name: each.grad.clone() for name, each in model.named_parameters()}
            outcomes.append({"loss": losses.detach(), **gradients})
    assert len(nets) == 1
    for outcome in outcomes[1:]:
        errors = {name: relative(outcome[name], each) for name, each in outcomes[0].items()}
        assert max(errors.values()) < 2e-5, sorted(errors.items(), key=lambda item: -item[1])[:5]
    groups.destroy()
