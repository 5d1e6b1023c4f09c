"""The kernels before attention equal plain code in float64, in Triton's interpreter on the CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.model.helpers import relative
from tests.model.kernels.interpreted_gating import bare

#: Tokens, groups, queries of a group, width of a head, rotated width, gated, zero-centered, dtype, allowed error.
CASES: tuple[tuple[Any, ...], ...] = (
    (5, 2, 3, 16, 8, True, True, torch.float32, 1e-6),
    (11, 1, 2, 128, 128, False, False, torch.float32, 1e-6),  # as in Qwen3-VL; the last program in part
    (11, 2, 2, 256, 64, True, True, torch.float32, 1e-6),  # as in Qwen3.5; two programs of each head
    (3, 2, 1, 24, 12, True, False, torch.float32, 1e-6),  # no powers of two
    (35, 2, 2, 128, 32, True, True, torch.bfloat16, 6e-3),  # three programs
)


def take_few_tiles() -> None:
    """Programs go through two tiles, not 8 or 16: few tokens have several programs."""
    from vlmdata.model.kernels import attention_inputs

    attention_inputs.FORWARD, attention_inputs.BACKWARD = (4, 2, 4), (2, 4, 2)


def interpreted() -> None:
    from tests.model.kernels.attention_inputs import compared
    from vlmdata.model.kernels.attention_inputs import AttentionHeads

    take_few_tiles()
    for tokens, groups, queries, width, rotated, gated, zero_centered, dtype, limit in CASES:
        heads = AttentionHeads(groups, queries, width, gated, zero_centered, 1e-3)
        errors = compared(tokens, heads, rotated, dtype)
        assert max(errors.values()) < limit, (tokens, heads, dtype, errors)


class WithBias(torch.nn.Linear):
    """Returns a bias apart, as linear layers of megatron-core do."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


def in_the_layer() -> None:
    """The layer with kernels gives what the layer without gives, with and without gates."""
    from vlmdata.model.network.attention import InterleavedMRoPE, KernelSelfAttention, RotatedSelfAttention
    from vlmdata.model.network.provider import RMSNorm

    take_few_tiles()
    generator = torch.Generator().manual_seed(3)
    angles = InterleavedMRoPE(8, 1e4)(torch.randint(0, 90, (3, 1, 11), generator=generator), [2, 1, 1])
    for gated, zero_centered in ((True, True), (False, False)):
        config = SimpleNamespace(
            num_query_groups=2,
            layernorm_zero_centered_gamma=zero_centered,
            layernorm_epsilon=1e-3,
            apply_rope_fusion=False,
            test_mode=False,
            use_cpu_initialization=True,
            params_dtype=torch.float32,
            sequence_parallel=False,
        )
        norms = [RMSNorm(config, 16, 1e-3) for _ in range(2)]  # type: ignore[arg-type]
        for norm in norms:
            torch.nn.init.normal_(norm.weight, generator=generator)
        project = WithBias(10, 2 * (3 * (1 + gated) + 2) * 16)
        hidden = torch.randn(11, 1, 10, generator=generator).requires_grad_()
        results: list[list[Tensor]] = []
        calls: list[Any] = []
        norms[0].register_forward_pre_hook(
            lambda module, *_, calls=calls: calls.append(module)
        )  # as the distributed optimizer's
        for kind in (RotatedSelfAttention, KernelSelfAttention):
            layer = bare(kind)
            layer.config, layer._angles, layer.world_size = config, angles, 1
            layer.hidden_size_per_attention_head, layer.num_query_groups_per_partition = 16, 2
            layer.num_attention_heads_per_partition = 6
            layer.q_layernorm, layer.k_layernorm = norms
            layer.linear_qkv = project
            made = layer.get_query_key_value_tensors(hidden, None, output_gate=gated, split_qkv=True)
            pull = [torch.sin(torch.arange(each.numel())).view(each.shape) for each in made]
            wrt = [hidden, project.weight, norms[0].weight, norms[1].weight]
            results.append([*made, *torch.autograd.grad(made, wrt, pull)])
        assert len(calls) == 2, "the kernel did not wait for the weight"
        assert len(results[0]) == (8 if gated else 7)
        for a, b in zip(*results, strict=True):
            assert a.shape == b.shape
            assert relative(b.detach(), a.detach()) < 2e-6
