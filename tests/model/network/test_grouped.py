"""The weights of all experts lie in line, also in gradient buffers, and their gradients are complete together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("megatron.core")
pytest.importorskip("triton")

from vlmdata.model.network.grouped import ExpertRows, grouped_product, lay_out_experts, weights_in_line
from vlmdata.model.training.optimizer.small_gradients import GradientBuffers

COUNTS = [5, 0, 3, 9]


class Experts(nn.Module):
    """What the product needs of Transformer Engine's grouped layer, and a layer before it."""

    fuse_wgrad_accumulation = True

    def __init__(self, rows: int = 32, columns: int = 8) -> None:
        super().__init__()
        self.before = nn.Linear(columns, columns, bias=False)
        self.num_gemms, self.config = len(COUNTS), SimpleNamespace(fp8=None, fp4=None)
        for number in range(self.num_gemms):
            self.register_parameter(f"weight{number}", nn.Parameter(torch.randn(rows, columns)))

    @property
    def weights(self) -> list[Any]:
        return [getattr(self, f"weight{number}") for number in range(self.num_gemms)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        whole = weights_in_line(self, x)
        assert whole is not None
        return grouped_product(self, x, ExpertRows.of(COUNTS, x.device), whole)


def made(distributed: bool = False, **options: Any) -> tuple[Any, Experts]:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(1)
    layer = Experts()
    lay_out_experts(layer)
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, calculate_per_token_loss=True)
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed, **options)
    return GradientBuffers(config, settings, layer), layer


@pytest.fixture
def plain_gradients(monkeypatch: pytest.MonkeyPatch) -> list[Experts]:
    """Has torch compute what the kernel computes; holds the layer whose gradients it adds."""
    layers: list[Experts] = []

    def add(x: Tensor, d: Tensor, ends: Tensor, places: Tensor) -> None:
        weights = layers[0].weights
        assert places.tolist() == [each.main_grad.data_ptr() for each in weights]
        for each, pull, given in zip(weights, d.split(COUNTS), x.split(COUNTS), strict=True):
            each.main_grad.add_(pull.T @ given)

    monkeypatch.setattr("vlmdata.model.kernels.expert_gradients.add_weight_gradients", add)
    return layers


@pytest.mark.parametrize("distributed", [False, True])
def test_buffers_keep_weights_in_line(one_process: None, distributed: bool) -> None:
    _, layer = made(distributed)
    x = torch.randn(17, 8)
    whole = weights_in_line(layer, x)
    assert whole is not None
    for part, weight in zip(whole, layer.weights, strict=True):
        assert part.data_ptr() == weight.data_ptr()
        assert torch.equal(part, weight)
    assert weights_in_line(layer, x.bfloat16()) is None
    layer.weight2.data = layer.weight2.detach().clone()
    layer.weight3.data = layer.weight3.detach().clone()
    assert weights_in_line(layer, x) is None


def test_weights_without_a_buffer_are_multiplied_one_by_one(one_process: None) -> None:
    layer, x = Experts(), torch.randn(17, 8)
    assert weights_in_line(layer, x) is None
    lay_out_experts(layer)
    assert weights_in_line(layer, x) is None, "gradients have no place"
    layer.requires_grad_(False)
    assert weights_in_line(layer, x) is not None
    layer.config.fp8 = "hybrid"
    assert weights_in_line(layer, x) is None


@pytest.mark.parametrize("bucket_size", [None, 300])
def test_buckets_are_sent_once_all_gradients_are_made(
    one_process: None, plain_gradients: list[Experts], bucket_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped, layer = made(overlap_grad_reduce=True, bucket_size=bucket_size)
    plain_gradients.append(layer)
    groups = wrapped.bucket_groups
    assert len(groups) == (1 if bucket_size is None else 3)
    sent: dict[Any, list[Tensor]] = {}
    send = type(groups[0]).start_grad_sync

    def noted(group: Any, **all_of: Any) -> None:
        assert group not in sent
        send(group, **all_of)
        sent[group] = [each.grad_data.clone() for each in group.buckets]

    monkeypatch.setattr(type(groups[0]), "start_grad_sync", noted)
    for step in range(3):
        wrapped.zero_grad_buffer()
        inputs = [torch.randn(17, 8) for _ in range(2)]
        with wrapped.no_sync():
            wrapped(inputs[0]).sum().backward()
        assert not sent
        wrapped(inputs[1]).sum().backward()
        if step:  # megatron-core learns from a first step which gradients come
            assert set(sent) == set(groups)
        wrapped.finish_grad_sync()
        for group, gradients in sent.items():
            for bucket, gradient in zip(group.buckets, gradients, strict=True):
                assert torch.equal(bucket.grad_data, gradient), "sent before all gradients were made"
        sent.clear()
        wanted = [torch.zeros(32, 8) for _ in COUNTS]
        for x in inputs:
            parts = (x @ layer.before.weight.detach().T).split(COUNTS)
            wanted = [sums + torch.ones(len(part), 32).T @ part for sums, part in zip(wanted, parts, strict=True)]
        for each, gradient in zip(layer.weights, wanted, strict=True):
            torch.testing.assert_close(each.main_grad, gradient)
