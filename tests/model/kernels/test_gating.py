"""The Triton kernels of gates equal the plain code, in Triton's interpreter on the CPU."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.model.helpers import relative, small_architecture
from tests.model.kernels.interpreter import run_interpreted

pytest.importorskip("megatron.core")


def interpreted() -> None:
    """In a process of its own: whether Triton interprets is settled when the kernels are defined."""
    from model.kernels.gating import SwiGLUActivation, gated

    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    # Widths with a power of two as a factor and without, of less than a tile and of more; rows that are apart.
    for rows, width in ((37, 128), (5, 96), (3, 7), (2, 2560), (70, 64)):
        x = drawn(rows, 1, width).requires_grad_()
        apart = drawn(rows, 1, width + 16).requires_grad_()
        gate = apart[..., :width]
        plain = x * gate.sigmoid()
        ours = gated(x, gate.view(rows, width))
        grad = drawn(width, 1, rows).permute(2, 1, 0)
        wanted = torch.autograd.grad(plain, (x, apart), grad)
        given = torch.autograd.grad(ours, (x, apart), grad)
        for a, b in zip((ours, *given), (plain, *wanted), strict=True):
            assert a.shape == b.shape
            assert relative(a.detach(), b.detach()) < 1e-6
        both = drawn(rows, 1, 2 * width).requires_grad_()
        first, second = both.chunk(2, -1)
        plain, ours = F.silu(first) * second, SwiGLUActivation(None)(both)
        grad = drawn(rows, 1, width)
        for a, b in zip(
            (ours, *torch.autograd.grad(ours, both, grad)),
            (plain, *torch.autograd.grad(plain, both, grad)),
            strict=True,
        ):
            assert a.shape == b.shape
            assert relative(a.detach(), b.detach()) < 1e-6


def in_the_layers() -> None:
    """The delta net's and attention's functions against megatron-core's own, which torch would compile."""
    torch.compiler.set_stance("force_eager")
    import megatron.core.ssm.gated_delta_net.common as theirs
    from megatron.core.transformer.attention import SelfAttention

    import model.families.qwen3_5.gated_delta_net as ours
    from model.network.attention import KernelSelfAttention

    generator = torch.Generator().manual_seed(2)
    net = bare(ours.KernelGatedDeltaNet)
    net.act_fn, net.out_norm = F.silu, torch.nn.RMSNorm(16, eps=1e-5)
    net.config = SimpleNamespace(layernorm_epsilon=1e-5)
    x = torch.randn(1, 21, 3, 16, generator=generator).requires_grad_()
    projected = torch.randn(21, 60, generator=generator).requires_grad_()
    gate = projected[:, 5:53]
    wanted = theirs._GDNBase._apply_gated_norm(net, x, gate.view(1, 21, 3, 16))
    found = net._apply_gated_norm(x, gate)
    pull = torch.randn(found.shape, generator=generator)
    gradients = [
        torch.autograd.grad(each.view(pull.shape), (x, projected), pull, retain_graph=True) for each in (found, wanted)
    ]
    for a, b in zip((found, *gradients[0]), (wanted.view(pull.shape), *gradients[1]), strict=True):
        assert relative(a.detach(), b.detach()) < 1e-6
    x, gate = torch.randn(2, 9, 1, 64, generator=generator)
    attention = bare(KernelSelfAttention)
    wanted = SelfAttention._apply_output_gate(attention, x, gate.view(9, 1, 4, 16))
    assert relative(attention._apply_output_gate(x, gate.view(9, 1, 4, 16)), wanted) < 1e-6


def bare(kind: Any) -> Any:
    """A module without its constructor, which needs CUDA."""
    made = kind.__new__(kind)
    torch.nn.Module.__init__(made)
    return made


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton here")
def test_the_kernels_equal_the_plain_code() -> None:
    run_interpreted(__name__, "interpreted", "in_the_layers")


def test_a_decoder_layer_takes_them_if_torch_shall_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.mlp import MLP

    from model.families.qwen3_5.build import language_config
    from model.network.decoder_layer import _residual_sum, full_attention, layer_spec
    from model.network.provider import TorchProvider
    from model.network.settings import ModelSettings

    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", object())  # Transformer Engine's, which needs CUDA
    settings = ModelSettings(backend="transformer_engine", precision="bf16", compile=False)
    config = language_config(small_architecture(), settings)
    assert (config.use_te_activation_func, config.bias_activation_fusion) == (True, False)
    provider = TorchProvider()
    provider.compiled = False
    layer = layer_spec(config, provider, full_attention(provider)).submodules
    assert layer.self_attention.module.__name__ == "KernelSelfAttention"
    x, residual = torch.randn(2, 3, 4)
    for each in (layer.self_attn_bda, layer.mlp_bda):
        assert each is _residual_sum
        assert torch.equal(each(True, True)((x, None), residual, 0.0), residual + x)
    assert layer.mlp.keywords["submodules"].activation_func(config).__class__.__name__ == "SwiGLUActivation"
    assert layer.mlp.func.__self__ is MLP
