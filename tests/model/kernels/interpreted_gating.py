"""The Triton kernels of gates equal the plain code, in Triton's interpreter on the CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from tests.model.helpers import relative


def interpreted() -> None:
    from vlmdata.model.kernels.gating import SwiGLUActivation, gated

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

    import vlmdata.model.families.qwen3_5.gated_delta_net as ours
    from vlmdata.model.network.attention import KernelSelfAttention

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
