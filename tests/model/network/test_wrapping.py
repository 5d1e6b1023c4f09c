"""What wraps linear layers: in each layout it is a product of the whole layer's input, and a run can train only it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("megatron.core")

from model.network.wrapping import LinearWrapper, is_of_wrapper, wrap
from tests.model.helpers import relative
from tests.model.training.conftest import chats, evaluations_of, steps_of, train_here, validation  # noqa: F401
from tests.model.workers import run_in_all


class LowRank(LinearWrapper):
    """Adds b (a x), with b zero at first."""

    def __init__(self, layer: Any, rank: int = 3) -> None:
        super().__init__()
        rows, columns = layer.weight.shape
        like = {"dtype": layer.weight.dtype, "device": layer.weight.device}
        self.a = nn.Parameter(torch.linspace(-1, 1, rank * columns, **like).sin().view(rank, columns))
        self.b = nn.Parameter(torch.zeros(rows, rank, **like))
        self.shard_dims = {"b": 0} if layer.columns else {"a": 1}

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.a.T @ self.b.T

    def merged(self, weight: Tensor, own: Mapping[str, Tensor]) -> Tensor:
        return weight + own["b"] @ own["a"]


def attach(model: nn.Module) -> None:
    kinds = ("linear_qkv", "linear_proj", "in_proj", "linear_fc1", "linear_fc2", "qkv")
    assert wrap(model, lambda name, layer: LowRank(layer) if name.endswith(kinds) else None) > 10


# Layers of a tensor-parallel pair: width 6, inner width 8, four tokens.


def _whole(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _pair(sequence_parallel: bool) -> dict[str, Tensor]:
    """The output for all tokens and the gradients of a rank, of a column-parallel and a row-parallel layer in turn."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    from model.network.provider import TorchProvider
    from model.parallel import groups

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
    assert wrap(model, lambda name, layer: LowRank(layer)) == 2
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
    found = {name: model.get_parameter(name).grad for name, *_ in _SHAPES}
    return {"out": out.detach(), "x": x.grad, **found}


_SHAPES: list[tuple[str, int | None, tuple[int, int]]] = [
    ("first.weight", 0, (8, 6)),
    ("first.wrapper.a", None, (3, 6)),
    ("first.wrapper.b", 0, (8, 3)),
    ("second.weight", 1, (6, 8)),
    ("second.wrapper.a", 1, (3, 8)),
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


def _train_wrapped(monkeypatch: pytest.MonkeyPatch, *args: Any, **settings: Any) -> None:
    """Trains nothing but wrappers."""
    from model.training import loop

    build = loop.build

    def wrapped(*given: Any) -> Any:
        model = build(*given)
        attach(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_of_wrapper(name))
        return model

    with monkeypatch.context() as patched:
        patched.setattr(loop, "build", wrapped)
        train_here(*args, **settings)


def test_steps_a_checkpoint_and_an_export_that_merges(
    one_process: None,
    chats: Path,  # noqa: F811
    validation: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from model.weights.convert import to_hf
    from model.weights.hf_files import HfTensors, WeightsError

    settings: dict[str, Any] = {"data__eval_paths": [str(validation)], "optimizer__lr": 2e-3}
    train_here(tmp_path / "base", chats, run__steps=1, **settings)
    base = tmp_path / "base" / "checkpoints" / "step-00000001"
    start = settings | {"model__weights": str(base), "run__steps": 4, "run__save_every": 2, "run__keep": 0}
    _train_wrapped(monkeypatch, tmp_path / "run", chats, **start)
    assert "has no weights of wrappers" in capsys.readouterr().out
    losses = [each["loss"] for each in steps_of(tmp_path / "run")]
    assert len(losses) == 4

    # Resumed half-way, the second half is the same.
    _train_wrapped(monkeypatch, tmp_path / "half", chats, **(start | {"run__steps": 2, "optimizer__decay_steps": 12}))
    _train_wrapped(monkeypatch, tmp_path / "half", chats, resume=True, **start)
    assert [each["loss"] for each in steps_of(tmp_path / "half")] == losses

    newest = tmp_path / "run" / "checkpoints" / "step-00000004"
    with pytest.raises(WeightsError, match=r"wrapper"):  # nothing is silently left out
        to_hf(newest, tmp_path / "refused")
    to_hf(newest, tmp_path / "merged", wrap=attach)
    to_hf(base, tmp_path / "plain")
    merged, plain = HfTensors(tmp_path / "merged"), HfTensors(tmp_path / "plain")
    changed = {name for name in plain.tensors if not torch.equal(merged.read(name, None), plain.read(name, None))}
    assert changed
    assert all("proj" in name or "fc" in name or "qkv" in name for name in changed)

    # What was exported computes what the wrapped model did.
    again = settings | {"model__weights": str(tmp_path / "merged"), "optimizer__lr": 0, "optimizer__min_lr": 0}
    train_here(tmp_path / "again", chats, run__steps=1, **again)
    wanted, found = (evaluations_of(tmp_path / name)[-1]["loss"] for name in ("run", "again"))
    assert abs(found - wanted) < 2e-6 * abs(wanted)
    assert wanted < evaluations_of(tmp_path / "base")[-1]["loss"] - 1e-3
