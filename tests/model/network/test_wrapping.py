"""What wraps linear layers: with tensor parallelism, it is a product of the whole layer's input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("megatron.core")

from tests.model.helpers import relative
from tests.model.workers import run_in_all
from vlmdata.model.network.wrapping import LinearWrapper, sum_wrapper_gradients, wrap


class LowRank(LinearWrapper):
    """Adds b (a x), with the rows and columns of this rank."""

    narrowing = frozenset(["a"])

    def __init__(self, layer: Any, rank: int = 3) -> None:
        super().__init__()
        group, (rows, columns) = layer.tensor_group, layer.weight.shape
        whole = group.size()
        self.a = nn.Parameter(torch.zeros(rank, columns if layer.columns else columns * whole))
        self.b = nn.Parameter(torch.zeros(rows * whole if layer.columns else rows, rank))
        own = slice(group.rank() * rows, (group.rank() + 1) * rows)
        self.rows = own if layer.columns else slice(None)
        own = slice(group.rank() * columns, (group.rank() + 1) * columns)
        self.columns = slice(None) if layer.columns else own

    def narrow(self, x: Tensor) -> Tensor:
        return x @ self.a[:, self.columns].T

    def widen(self, narrow: Tensor, out: Tensor) -> Tensor:
        return out + narrow @ self.b[self.rows].T


# Layers of a tensor-parallel pair: width 6, inner width 8, four tokens.


def _whole(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _pair(sequence_parallel: bool) -> dict[str, Tensor]:
    """The output for all tokens and the gradients of a rank, of a column-parallel and a row-parallel layer in turn."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    from vlmdata.model.network.provider import TorchProvider
    from vlmdata.model.parallel import groups

    size, rank = dist.get_world_size(), dist.get_rank()
    groups.initialize(tensor=size, backend="gloo")
    config = TransformerConfig(
        num_layers=1,
        hidden_size=6,
        num_attention_heads=2,
        tensor_model_parallel_size=size,
        sequence_parallel=sequence_parallel and size > 1,
        use_cpu_initialization=True,
    )
    provider, group = TorchProvider(), parallel_state.get_tensor_model_parallel_group()
    common = {"config": config, "init_method": nn.init.normal_, "bias": False, "skip_bias_add": False}
    common |= {"is_expert": False, "tp_group": group}
    model = nn.Module()
    model.first = provider.column_parallel_linear()(6, 8, gather_output=False, **common)
    model.second = provider.row_parallel_linear()(8, 6, input_is_parallel=True, **common)
    for layer in (model.first, model.second):
        wrap(layer, LowRank(layer))
    x = _whole((4, 1, 6), 0).requires_grad_()
    with torch.no_grad():
        for seed, (name, axis, shape) in enumerate(_SHAPES, 1):
            value = _whole(shape, seed)
            own = value if axis is None else value.chunk(size, axis)[rank]
            model.get_parameter(name).copy_(own)
    given = x.chunk(size)[rank] if config.sequence_parallel else x
    out = model.second(model.first(given)[0].relu())[0]
    factors = _whole((4, 1, 6), 9)
    (out * (factors.chunk(size)[rank] if config.sequence_parallel else factors)).sum().backward()
    parameters = {name: model.get_parameter(name) for name, *_ in _SHAPES}
    for each in parameters.values():
        each.main_grad = each.grad
    sum_wrapper_gradients(parameters.values())
    found = {name: each.grad for name, each in parameters.items()}
    return {"out": out.detach(), "x": x.grad, **found}


_SHAPES: list[tuple[str, int | None, tuple[int, int]]] = [
    ("first.weight", 0, (8, 6)),
    ("first.wrapper.a", None, (3, 6)),
    ("first.wrapper.b", None, (8, 3)),
    ("second.weight", 1, (6, 8)),
    ("second.wrapper.a", None, (3, 8)),
    ("second.wrapper.b", None, (6, 3)),
]


def _expected() -> dict[str, Tensor]:
    x = _whole((4, 1, 6), 0).requires_grad_()
    own = {name: _whole(shape, seed).requires_grad_() for seed, (name, _, shape) in enumerate(_SHAPES, 1)}
    first, second = (
        own[f"{name}.weight"] + own[f"{name}.wrapper.b"] @ own[f"{name}.wrapper.a"] for name in ("first", "second")
    )
    out = (x @ first.T).relu() @ second.T
    (out * _whole((4, 1, 6), 9)).sum().backward()
    return {"out": out.detach(), "x": x.grad, **{name: each.grad for name, each in own.items()}}  # type: ignore[dict-item]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_ranks_compute_the_wrapper_of_the_whole_layer(sequence_parallel: bool) -> None:
    found = run_in_all(_pair, sequence_parallel, world=2)
    axes = {name: axis for name, axis, _ in _SHAPES}
    for name, wanted in _expected().items():
        parts = [each[name] for each in found]
        if name == "out" and sequence_parallel:
            parts = [torch.cat(parts)]
        elif name == "x" and sequence_parallel:
            parts = [sum(parts)]  # each rank took some of its rows
        elif axes.get(name) is not None:
            parts = [torch.cat(parts, axes[name])]
        for part in parts:
            assert relative(part, wanted) < 1e-6, name
