"""The Triton kernel of experts' gradients equals products one by one, in Triton's interpreter on the CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.model.helpers import relative
from tests.model.kernels.interpreter import accept_scalar_bounds
from vlmdata.model.kernels.expert_gradients import ProductTiling, add_weight_gradients

TILING = ProductTiling(16, 32, 16, 4, 1)


def interpreted() -> None:
    accept_scalar_bounds()
    generator = torch.Generator().manual_seed(1)
    for counts, k, n in (([5, 0, 33, 16], 48, 40), ([0, 0, 1], 32, 16), ([0, 0], 8, 8)):
        x, d = (torch.randn(sum(counts), width, generator=generator) for width in (k, n))
        gradients = [torch.full((n, k), 0.5) for _ in counts]
        places = torch.tensor([each.data_ptr() for each in gradients])
        ends = torch.tensor(counts).cumsum(0).int()
        add_weight_gradients(x, d, ends, places, TILING)
        pairs = zip(d.split(counts), x.split(counts), strict=True)
        for found, (pull, given) in zip(gradients, pairs, strict=True):
            torch.testing.assert_close(found, pull.T @ given + 0.5, rtol=1e-5, atol=1e-5)


class Grouped(nn.Module):
    """What the product needs of Transformer Engine's grouped layer."""

    fuse_wgrad_accumulation = True

    def __init__(self, experts: int, n: int, k: int) -> None:
        super().__init__()
        self.num_gemms, self.config = experts, SimpleNamespace(fp8=None, fp4=None)
        for number in range(experts):
            weight: Any = nn.Parameter(torch.randn(n, k))
            weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(n, k), False
            self.register_parameter(f"weight{number}", weight)


def in_the_layer() -> None:
    """Outputs and gradients over two passes are those of products one by one."""
    from vlmdata.model.network.grouped import ExpertRows, grouped_product, lay_out_experts, weights_in_line

    accept_scalar_bounds()
    torch.manual_seed(2)
    layer, counts = Grouped(4, 24, 16), [3, 0, 7, 2]
    lay_out_experts(layer)
    assert [name for name, _ in layer.named_parameters()] == [f"weight{number}" for number in (3, 2, 1, 0)]
    weights: list[Any] = [getattr(layer, f"weight{number}") for number in range(4)]
    plain = [each.detach().clone().requires_grad_() for each in weights]
    for _ in range(2):
        x = torch.randn(sum(counts), 16, requires_grad=True)
        same = x.detach().clone().requires_grad_()
        whole = weights_in_line(layer, x)
        assert whole is not None
        out = grouped_product(layer, x, ExpertRows.of(counts, x.device), whole)
        wanted: Tensor = torch.cat([part @ weight.T for part, weight in zip(same.split(counts), plain, strict=True)])
        pull = torch.randn(out.shape[::-1]).T
        torch.autograd.backward([out, wanted], [pull, pull])
        assert relative(out.detach(), wanted.detach()) < 1e-6
        assert x.grad is not None
        assert same.grad is not None
        assert relative(x.grad, same.grad) < 1e-6
        assert weights[0].grad_added_to_main_grad
        assert weights[0].grad is not None
        weights[0].grad = None
    for each, other in zip(weights, plain, strict=True):
        wanted = torch.zeros_like(other) if other.grad is None else other.grad
        torch.testing.assert_close(each.main_grad, wanted, rtol=1e-5, atol=1e-5)
