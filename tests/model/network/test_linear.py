"""The short way of Transformer Engine's linear layers: when it is taken, and what optimizers find after it.

Transformer Engine needs CUDA. Its functions are plain torch here, and its layers a class with the settings that decide.
``tests/model/gpu_linear.py`` compares both ways on a GPU, bit by bit.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vlmdata.model.network import linear
from vlmdata.model.network.linear import Norm, ShortNormLinear, with_short_way


class PlainEngine:
    """Transformer Engine's functions in plain torch. Like them, they need contiguous tensors."""

    def __init__(self) -> None:
        self.quantising = self.instrumented = False
        self.calls: list[str] = []
        self.placeholders: list[Tensor] = []

    def quantizes(self) -> bool:
        return self.quantising

    def is_instrumented(self) -> bool:
        return self.instrumented

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert x.is_contiguous()
        self.calls.append("product")
        return F.linear(x, weight, bias)

    def input_gradient(self, d: Tensor, weight: Tensor) -> Tensor:
        assert d.is_contiguous()
        self.calls.append("input")
        return d @ weight

    def weight_gradient(
        self, x: Tensor, d: Tensor, bias: Tensor | None, into: Tensor | None, accumulate: bool
    ) -> tuple[Tensor, Tensor | None]:
        self.calls.append("weight")
        x, d = x.reshape(-1, x.shape[-1]), d.reshape(-1, d.shape[-1])
        found = d.T @ x
        if into is not None:
            found = into.mul_(1 if accumulate else 0).add_(found)
        return found, None if bias is None else d.sum(0)

    def norm(self, x: Tensor, scale: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        rate = torch.rsqrt(x.square().mean(-1) + norm.eps)
        return x * rate[:, None] * (scale + norm.zero_centered), rate

    def norm_backward(self, d: Tensor, x: Tensor, rate: Tensor, scale: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        self.calls.append("norm")
        unit = x * rate[:, None]
        pull = d * (scale + norm.zero_centered)
        return rate[:, None] * (pull - unit * (pull * unit).mean(-1, keepdim=True)), (d * unit).sum(0)

    def placeholder(self, shape: list[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
        self.placeholders.append(torch.full(shape, 0.0 if zero else float("nan"), dtype=dtype))
        return self.placeholders[-1]


class Layer(nn.Module, ABC):
    """What megatron-core's and Transformer Engine's classes have that the short way reads."""

    def __init__(self, *, bias: bool = False, skip_bias: bool = False, row: bool = False, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(5, 3, dtype=torch.float32))
        self.layer_norm_weight = nn.Parameter(torch.randn(3))
        # Without a bias, Transformer Engine's attribute is an empty tensor.
        self.bias: Any = nn.Parameter(torch.randn(5)) if bias else torch.empty(0)
        self.apply_bias, self.te_return_bias = bias and not skip_bias, bias and skip_bias
        self.gemm_bias_unfused_add = row and self.apply_bias
        self.is_first_microbatch, self.disable_parameter_transpose_cache = True, False
        self.fuse_wgrad_accumulation = False
        names = ("fp8", "fp4", "cpu_offloading", "fine_grained_activation_offloading")
        self.config = SimpleNamespace(**dict.fromkeys(names))
        self.te_quant_params = self.fsdp_group = None
        self.is_fsdp2 = self.return_layernorm_output = False
        self.tp_size, self.weight_names, self.normalization = 1, ["weight"], "RMSNorm"
        self.wgrad_store = SimpleNamespace(delay_wgrad_compute=lambda: False)
        self.eps, self.zero_centered_gamma = 1e-6, True
        self.fwd_ln_sm_margin = self.inf_ln_sm_margin = self.bwd_ln_sm_margin = 0
        for name in linear._OVERLAPS:
            setattr(self, name, False)
        for name, value in options.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> tuple[str, None]:
        return "long", None


Short: Any = with_short_way(Layer)
ShortNorm: Any = with_short_way(Layer, ShortNormLinear)
KINDS = [Short, ShortNorm]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> PlainEngine:
    plain = PlainEngine()
    monkeypatch.setattr(linear, "engine", lambda: plain)
    return plain


def expected(layer: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """The same by torch's own backward pass."""
    if isinstance(layer, ShortNorm):
        x = F.rms_norm(x, (3,), eps=layer.eps) * (1 + layer.layer_norm_weight)
    bias = layer.bias if isinstance(layer.bias, nn.Parameter) else None
    out = F.linear(x, layer.weight, bias if layer.apply_bias else None)
    return out, bias if layer.te_return_bias else None


def gradients(layer: Any, function: Callable[[Tensor], Any], x: Tensor) -> dict[str, Tensor | None]:
    """Gradients of x and the parameters, for a loss in which the returned bias takes part."""
    layer.zero_grad()
    x = x.detach().clone().requires_grad_(x.requires_grad)
    out, bias = function(x)
    # Neither the factors nor the gradient of the output are contiguous.
    factors = torch.linspace(-1, 1, out.numel()).view(out.shape[::-1]).permute(*reversed(range(out.dim())))
    total = (out * factors).sum() + (0 if bias is None else bias.sum())
    total.backward()
    return {"x": x.grad, "out": out.detach()} | {name: each.grad for name, each in layer.named_parameters()}


def agree(found: dict[str, Tensor | None], wanted: dict[str, Tensor | None]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (found[name] is None) == (value is None), name
        if value is not None:
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options", [{}, {"bias": True}, {"bias": True, "skip_bias": True}, {"bias": True, "row": True}]
)
@pytest.mark.parametrize("shape", [(7, 3), (7, 1, 3), (0, 1, 3), (2, 4, 3)])
def test_equals_torch(engine: PlainEngine, kind: type, options: dict[str, bool], shape: tuple[int, ...]) -> None:
    layer, x = kind(**options), torch.randn(shape, requires_grad=True)
    agree(gradients(layer, layer, x), gradients(layer, lambda given: expected(layer, given), x))
    assert engine.calls.count("product") == 1
    ways = (layer, lambda given: expected(layer, given))
    # Columns that are not next to each other.
    agree(*(gradients(layer, lambda given, way=way: way(torch.stack([given, given], -1)[..., 0]), x) for way in ways))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frozen", [("weight", "bias"), ("layer_norm_weight",), ("x",), ("x", "layer_norm_weight")])
def test_frozen_parameters_and_inputs(engine: PlainEngine, kind: type, frozen: tuple[str, ...]) -> None:
    layer = kind(bias=True)
    for name in frozen:
        if name != "x":
            getattr(layer, name).requires_grad_(False)
    x = torch.randn(6, 1, 3, requires_grad="x" not in frozen)
    agree(gradients(layer, layer, x), gradients(layer, lambda given: expected(layer, given), x))
    assert ("weight" in engine.calls) == ("weight" not in frozen)
    no_input = "x" in frozen and (kind is Short or "layer_norm_weight" in frozen)
    assert ("input" in engine.calls) == (not no_input)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_saved_for_a_frozen_weight(engine: PlainEngine, kind: type) -> None:
    layer = kind()
    shapes: list[Any] = []
    saved: list[int] = []
    for frozen in (False, True):
        layer.weight.requires_grad_(not frozen)
        shapes.clear()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda each: shapes.append(each.shape) or each, lambda each: each
        ):
            layer(torch.randn(6, 3, requires_grad=True))
        saved.append(shapes.count((6, 3)))  # x, and the norm
    assert saved == ([1, 0] if kind is Short else [2, 1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recompute", [None, True, False])
@pytest.mark.parametrize("of_ddp", [True, False])
def test_gradients_go_to_main_grad(engine: PlainEngine, kind: type, recompute: bool | None, of_ddp: bool) -> None:
    layer = kind(bias=True, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.full((5, 3), 100.0)
    if of_ddp:
        layer.weight.grad_added_to_main_grad = False
    heard: list[Any] = []
    layer.weight.register_post_accumulate_grad_hook(lambda weight: heard.append(weight.grad))
    function = layer if recompute is None else lambda x: checkpoint(layer, x, use_reentrant=recompute)
    x = torch.randn(6, 1, 3, requires_grad=True)
    wanted = gradients(layer, lambda given: expected(layer, given), x)
    heard.clear()
    start = layer.weight.main_grad
    for number in (1, 2, 3):
        found = gradients(layer, function, x)
        # The first micro-batch overwrites, except that reentrant checkpoints first run forward without gradients.
        before = 100 if recompute else 0
        target = before + number * wanted["weight"]
        torch.testing.assert_close(layer.weight.main_grad, target, rtol=1e-5, atol=1e-4)
        assert layer.weight.main_grad is start
        if of_ddp:
            assert layer.weight.grad_added_to_main_grad
            assert len(heard) == number, "megatron-core's hook did not run"
            assert heard[-1].isnan().all()
        else:
            assert found["weight"] is None
            assert heard == [None] * number
        found["weight"] = wanted["weight"]
        agree(found, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_marks_of_weights(engine: PlainEngine, kind: type) -> None:
    layer = kind(fuse_wgrad_accumulation=True, is_first_microbatch=False)
    layer.weight.main_grad = torch.full((5, 3), 7.0)
    layer.weight.grad_added_to_main_grad, layer.weight.zero_out_wgrad = False, True
    x = torch.randn(4, 3)
    wanted = gradients(layer, lambda given: expected(layer, given), x)["weight"]
    found = gradients(layer, layer, x)["weight"]
    assert found is not None
    assert not found.any()
    torch.testing.assert_close(layer.weight.main_grad, 7 + wanted)
    layer.weight.overwrite_main_grad = True
    gradients(layer, layer, x)
    torch.testing.assert_close(layer.weight.main_grad, wanted)
    del layer.weight.overwrite_main_grad
    layer.is_first_microbatch = layer.disable_parameter_transpose_cache = True
    gradients(layer, layer, x)
    torch.testing.assert_close(layer.weight.main_grad, 2 * wanted)
    assert not layer.is_first_microbatch


@pytest.mark.parametrize("kind", KINDS)
def test_without_gradients(engine: PlainEngine, kind: type) -> None:
    layer, x = kind(bias=True, row=True), torch.randn(6, 1, 3)
    with torch.no_grad():
        out, bias = layer(x)
    assert not out.requires_grad
    assert bias is None
    assert not layer.is_first_microbatch
    torch.testing.assert_close(out, expected(layer, x)[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {"tp_size": 2},
        {"te_quant_params": object()},
        {"fsdp_group": object()},
        {"weight_names": ["query_weight", "key_weight"]},
        {"wgrad_store": SimpleNamespace(delay_wgrad_compute=lambda: True)},
        *({name: True} for name in linear._OVERLAPS),
        *({"config": name} for name in ("fp8", "fp4", "cpu_offloading", "fine_grained_activation_offloading")),
        {"layer_norm_weight": nn.Parameter(torch.ones(3).bfloat16())},
    ],
)
def test_settings_that_need_the_long_way(engine: PlainEngine, kind: type, options: dict[str, Any]) -> None:
    layer = kind(**{name: value for name, value in options.items() if name != "config"})
    if "config" in options:
        setattr(layer.config, options["config"], True)
    assert layer(torch.randn(4, 3))[0] == "long"
    assert layer.is_first_microbatch


@pytest.mark.parametrize("option", [{"normalization": "LayerNorm"}, {"return_layernorm_output": True}])
def test_norms_that_need_the_long_way(engine: PlainEngine, option: dict[str, Any]) -> None:
    assert ShortNorm(**option)(torch.randn(4, 3))[0] == "long"
    assert Short(**option)(torch.randn(4, 3))[0] != "long"


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_need_the_long_way(engine: PlainEngine, kind: type) -> None:
    class Shard(nn.Parameter):
        pass

    x = torch.randn(4, 3)
    layer = kind()
    layer.weight.is_distributed_weight = True
    assert layer(x)[0] == "long"
    layer = kind(is_fsdp2=True)
    layer.weight.__fsdp_param__ = True  # FSDP2 gathers it before a call: it is whole
    assert layer(x)[0] != "long"
    weight = layer._parameters["weight"]
    layer._parameters["weight"] = Shard(weight.data)  # Float8Tensor and DTensor are parameters of a class of their own
    assert layer(x)[0] == "long"
    layer = kind()
    del layer.weight  # as if it were split
    assert layer(x)[0] == "long"
    assert kind()(x.double())[0] == "long"
    assert kind()(x[0])[0] == "long"
    assert kind().half()(x.half())[0] == "long"


@pytest.mark.parametrize("kind", KINDS)
def test_contexts_that_need_the_long_way(engine: PlainEngine, kind: type) -> None:
    layer, x = kind(), torch.randn(4, 3)
    assert layer(x)[0] != "long"
    engine.quantising = True
    assert layer(x)[0] == "long"
    engine.quantising = False
    torch.set_autocast_enabled("cuda", True)
    try:
        assert layer(x)[0] == "long"
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert layer(x)[0] != "long"
    engine.instrumented = True
    assert layer(x)[0] != "long", "decided once"
    assert kind()(x)[0] == "long"


def test_classes_keep_their_names() -> None:
    assert Short.__name__ == ShortNorm.__name__ == "Layer"
    assert issubclass(Short, Layer)
    assert with_short_way(Layer) is Short


@pytest.mark.parametrize(
    ("version", "known"), [("2.20.2", True), ("2.20.0+abc", True), ("2.21.0", False), ("2.2", False)]
)
def test_other_versions_of_transformer_engine_keep_their_layers(
    monkeypatch: pytest.MonkeyPatch, version: str, known: bool
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    assert linear.functions_are_known() is known
