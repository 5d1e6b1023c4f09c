"""Adapters of all experts in grouped products, beside those of one expert after the other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("megatron.core")

from tests.model.helpers import relative
from vlmdata.model.lora.adapters import AdapterForm, ExpertAdapters
from vlmdata.model.lora.sites import LoraSite
from vlmdata.model.network.grouped import lay_out_experts
from vlmdata.model.network.wrapping import wrap_experts, wrappable_group

COUNTS = [5, 0, 3, 9]


class Grouped(nn.Module):
    """As Transformer Engine's grouped layer: a weight for each expert."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.num_gemms, self.config = len(COUNTS), SimpleNamespace(fp8=None, fp4=None)
        for number in range(self.num_gemms):
            weight = nn.Parameter(torch.randn(rows, columns), requires_grad=False)
            self.register_parameter(f"weight{number}", weight)

    def forward(self, x: Tensor, counts: list[int]) -> tuple[Tensor, None]:
        parts = zip(x.split(counts), self.parameters(), strict=False)
        return torch.cat([part @ weight.T for part, weight in parts]), None


def made(stack: bool) -> tuple[Any, ExpertAdapters]:
    torch.manual_seed(3)
    experts: Any = nn.Module()
    experts.linear_fc1 = wrappable_group(Grouped)(16, 8)
    experts.linear_fc2 = wrappable_group(Grouped)(8, 16)
    site = LoraSite("experts.gate_up_proj", "experts", 16, 8, len(COUNTS))
    adapter = ExpertAdapters(
        {"linear_fc1": site}, AdapterForm(4, 0.5, 0.0), experts.linear_fc1.weight0, (0, len(COUNTS))
    )
    for parameter in adapter.parameters():
        nn.init.normal_(parameter)
    wrap_experts(experts, adapter)
    if stack:
        lay_out_experts(experts)
    return experts, adapter


@pytest.mark.parametrize("stack", [False, True])
def test_grouped_products_are_those_of_each_expert(stack: bool) -> None:
    experts, adapter = made(stack)
    plain, same = made(False)
    results = []
    for number, (model, own) in enumerate([(experts, adapter), (plain, same)]):
        x = torch.linspace(-1, 1, sum(COUNTS) * 8).view(-1, 8).requires_grad_()
        if number == 0:
            wide = model.linear_fc1(x, COUNTS)[0]
        else:
            bases = [getattr(model.linear_fc1, f"weight{each}") for each in range(len(COUNTS))]
            parts = [own.of_one("linear_fc1", i, part, part @ bases[i].T) for i, part in enumerate(x.split(COUNTS))]
            wide = torch.cat(parts)
        out = model.linear_fc2(wide.relu(), COUNTS)[0]  # without an adapter
        (out * torch.arange(out.numel()).view(out.shape).sin()).sum().backward()
        results.append([out, x.grad, *(each.grad for each in own.parameters())])
    for found, wanted in zip(*results, strict=True):
        assert relative(found, wanted) < 1e-6
    weights = [experts.linear_fc1.weight0, experts.linear_fc1.weight1]
    assert (weights[0].untyped_storage().data_ptr() == weights[1].untyped_storage().data_ptr()) == stack
    assert torch.equal(weights[1], plain.linear_fc1.weight1)
    assert weights[0].grad is None


def test_a_rank_without_tokens_gives_all_adapters_a_gradient() -> None:
    experts, adapter = made(True)
    x = torch.zeros(0, 8)
    experts.linear_fc1(x, [0] * len(COUNTS))[0].sum().backward()
    assert all(each.grad is not None and not each.grad.any() for each in adapter.parameters())
