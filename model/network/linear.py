"""Linear layers of Transformer Engine with a short way from Python to its matrix products.

Transformer Engine's layers prepare each call for FP8, tensor parallelism and overlapped communication, which limits
small models, since the host then launches kernels more slowly than the GPU runs them. Without any of these, a call is
one matrix product forward and two backward, and a norm in some layers. The layers here then call Transformer Engine's
C++ functions themselves, with the same arguments, so results have the same bits. In all other cases they call
Transformer Engine's layer (docs/decisions/0067).

Mirrors ``_Linear`` and ``_LayerNormLinear`` of Transformer Engine 2.20. Shapes: tokens … (any number of axes), input
width k, output width n.
"""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class EngineFunctions:
    """Transformer Engine's C++ functions, with the arguments that its linear layers pass without FP8; CUDA only."""

    def __init__(self) -> None:
        from transformer_engine.pytorch import cpp_extensions
        from transformer_engine.pytorch.constants import TE_DType
        from transformer_engine.pytorch.cpp_extensions.gemm import get_cublas_workspace
        from transformer_engine.pytorch.module import base
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        self._gemm, self._types, self._workspace = cpp_extensions.generic_gemm, TE_DType, get_cublas_workspace
        self._norm, self._norm_backward = cpp_extensions.rmsnorm_fwd, cpp_extensions.rmsnorm_bwd
        self._split = base._2X_ACC_FPROP, base._2X_ACC_DGRAD, base._2X_ACC_WGRAD
        self._quantization = FP8GlobalStateManager
        self.placeholder = base.get_dummy_wgrad

    def quantizes(self) -> bool:
        """True within a context that quantises layers or calibrates them."""
        state = self._quantization.quantization_state
        return bool(state.fp8_enabled or state.fp8_calibration)

    def is_instrumented(self) -> bool:
        """True if Transformer Engine is exporting to ONNX, debugging, or moving activations to the host."""
        from transformer_engine.debug.pytorch.debug_state import TEDebugState
        from transformer_engine.pytorch.cpu_offload import is_cpu_offload_enabled
        from transformer_engine.pytorch.export import is_in_onnx_export_mode

        return bool(TEDebugState.debug_enabled or is_cpu_offload_enabled() or is_in_onnx_export_mode())

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns ``x @ weight.T + bias`` of (…, k), (n, k) and (n,): (…, n)."""
        out: Tensor = self._call(weight, True, x, False, None, x.dtype, bias, False, False, self._split[0])[0]
        return out

    def input_gradient(self, d: Tensor, weight: Tensor) -> Tensor:
        """Returns ``d @ weight`` of (…, n) and (n, k): (…, k)."""
        out: Tensor = self._call(weight, False, d, False, None, d.dtype, None, True, False, self._split[1])[0]
        return out

    def weight_gradient(
        self, x: Tensor, d: Tensor, bias: Tensor | None, into: Tensor | None, accumulate: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Returns ``d.T @ x``, (n, k), and, with a bias, the sum of d over tokens, (n,).

        Args:
            x: (…, k).
            d: (…, n).
            bias: (n,).
            into: Takes the product, (n, k); None for a new tensor in the dtype of x.
            accumulate: Whether to add to ``into`` instead of overwriting it.
        """
        dtype = x.dtype if into is None else into.dtype
        dweight, dbias, *_ = self._call(x, False, d, True, into, dtype, bias, True, accumulate, self._split[2])
        return dweight, dbias

    def norm(self, x: Tensor, scale: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """Returns the RMS norm of (R, k), and the inverse root mean square of each row, float32 (R,)."""
        kind = self._types[x.dtype]
        out, _, rate = self._norm(x, scale, norm.eps, None, None, kind, norm.margin, norm.zero_centered)
        return out, rate

    def norm_backward(self, d: Tensor, x: Tensor, rate: Tensor, scale: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """Returns the gradients of x (R, k) and of the norm's weight (k,)."""
        dx, dscale = self._norm_backward(d, x, rate, scale, norm.backward_margin, norm.zero_centered)
        return dx, dscale

    def _call(
        self,
        a: Tensor,
        turn_a: bool,
        b: Tensor,
        turn_b: bool,
        out: Tensor | None,
        dtype: torch.dtype,
        bias: Tensor | None,
        grad: bool,
        accumulate: bool,
        split: bool,
    ) -> Any:
        workspace = self._workspace(a.device.index, False, False)
        return self._gemm(
            a,
            turn_a,
            b,
            turn_b,
            out,
            None,  # quantizer
            self._types[dtype],
            bias,
            self._types[torch.bfloat16 if bias is None else bias.dtype],
            False,  # gelu
            None,
            grad,
            workspace,
            workspace.shape[0],
            accumulate,
            split,
            None,  # no communication
            None,
            None,
            False,
            1.0,
            1.0 if accumulate else 0.0,
        )


@functools.cache
def engine() -> EngineFunctions:
    """Returns Transformer Engine's functions, which are loaded in the first call."""
    return EngineFunctions()


class Norm(NamedTuple):
    """How a norm is computed.

    Attributes:
        eps: Added to the mean square.
        zero_centered: Whether the scale is 1 + weight.
        margin: Multiprocessors that the forward pass leaves free, by Transformer Engine's environment variables.
        backward_margin: The same for the backward pass.
    """

    eps: float
    zero_centered: bool
    margin: int
    backward_margin: int


class Product(torch.autograd.Function):
    """Maps x (…, k), weight (n, k) and bias (n,) to ``x @ weight.T + bias``, (…, n).

    ``accumulate`` is None for a weight gradient of its own. Otherwise the gradient goes to ``weight.main_grad``: added
    if True, else in its place.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, accumulate: bool | None) -> Tensor:
        """Multiplies."""
        ctx.save_for_backward(x if weight.requires_grad else None, weight, bias)
        # Not the saved tensor: under recomputation that is another object, without the optimizer's attributes.
        ctx.weight, ctx.accumulate = weight, accumulate
        return engine().product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of x, weight and bias. As in Transformer Engine, a frozen weight's bias has none."""
        x, weight, bias = ctx.saved_tensors
        of_x, of_weight, *_ = ctx.needs_input_grad
        d = grads[0].contiguous()
        dx = engine().input_gradient(d, weight) if of_x else None
        dweight, dbias = _gradients(ctx, x, d, bias) if of_weight else (None, None)
        return dx, dweight, dbias, None


class NormProduct(torch.autograd.Function):
    """Maps x (…, k), a norm's weight (k,), weight (n, k) and bias (n,) to the product of x's RMS norm, (…, n).

    ``accumulate`` is as in :class:`Product`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm, accumulate: bool | None
    ) -> Tensor:
        """Normalises and multiplies."""
        out, normed, rate = _norm_product(x, scale, weight, bias, norm)
        ctx.save_for_backward(x, scale, weight, bias, normed if weight.requires_grad else None, rate)
        ctx.weight, ctx.accumulate, ctx.norm = weight, accumulate, norm
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of x, the norm's weight, weight and bias."""
        x, scale, weight, bias, normed, rate = ctx.saved_tensors
        of_x, of_scale, of_weight, *_ = ctx.needs_input_grad
        d = grads[0].contiguous().view(-1, grads[0].shape[-1])
        dx = dscale = None
        dnormed = engine().input_gradient(d, weight) if of_x or of_scale else None
        dweight, dbias = _gradients(ctx, normed, d, bias) if of_weight else (None, None)
        if dnormed is not None:
            dx, dscale = engine().norm_backward(dnormed, x.view(-1, x.shape[-1]), rate, scale, ctx.norm)
            dx = dx.view(x.shape)
        return dx, dscale, dweight, dbias, None, None


class NormAlone(torch.autograd.Function):
    """Maps x (…, k) and a norm's weight (k,) to x's RMS norm, (…, k)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, norm: Norm) -> Tensor:
        """Normalises."""
        normed, rate = engine().norm(x.view(-1, x.shape[-1]), scale, norm)
        ctx.save_for_backward(x, scale, rate)
        ctx.norm = norm
        return normed.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of x and the norm's weight."""
        x, scale, rate = ctx.saved_tensors
        d = grads[0].contiguous().view(-1, grads[0].shape[-1])
        dx, dscale = engine().norm_backward(d, x.view(d.shape), rate, scale, ctx.norm)
        return dx.view(x.shape), dscale if ctx.needs_input_grad[1] else None, None


def _norm_product(
    x: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the product of x's norm, (…, n), the norm, (R, k), and its rates, (R,)."""
    normed, rate = engine().norm(x.view(-1, x.shape[-1]), scale, norm)
    return engine().product(normed, weight, bias).view(*x.shape[:-1], len(weight)), normed, rate


def _gradients(ctx: Any, x: Tensor, d: Tensor, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Returns the gradients of weight and bias.

    If the weight's goes to ``main_grad``, megatron-core's hook still expects a gradient: a tensor without meaning.
    """
    weight, accumulate = ctx.weight, ctx.accumulate
    if accumulate is None:
        return engine().weight_gradient(x, d, bias, None, False)
    _, dbias = engine().weight_gradient(x, d, bias, weight.main_grad, accumulate)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None, dbias
    weight.grad_added_to_main_grad = True
    zero = getattr(weight, "zero_out_wgrad", False)
    return engine().placeholder(list(weight.shape), weight.dtype, zero=zero), dbias


class ShortLinear(nn.Module):
    """The short way of a linear layer; a mixin of :func:`with_short_way`.

    Attributes:
        may_go_short: Whether the layer's settings allow the short way; None before its first call.
    """

    may_go_short: bool | None = None
    # Of Transformer Engine's layers, and of megatron-core's classes around them.
    apply_bias: bool
    gemm_bias_unfused_add: bool
    te_return_bias: bool
    is_first_microbatch: bool
    disable_parameter_transpose_cache: bool
    fuse_wgrad_accumulation: bool

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Maps (…, k) to (…, n), and returns the bias if it is not added here."""
        parameters = self._parameters
        if not _goes_short(self, x, parameters.get("weight")):
            longer: tuple[Tensor, Tensor | None] = super().forward(x)
            return longer
        bias: Any = parameters.get("bias")
        added = bias if self.apply_bias and not self.gemm_bias_unfused_add else None
        out = self._multiply(x.contiguous(), parameters["weight"], added)
        if self.gemm_bias_unfused_add:
            out = out + bias
        return out, bias if self.te_return_bias else None

    def _multiply(self, x: Tensor, weight: Any, bias: Any) -> Tensor:
        accumulate = self._accumulate(weight)
        if torch.is_grad_enabled():
            out: Tensor = Product.apply(x, weight, bias, accumulate)
            return out
        return engine().product(x, weight, bias)

    def _accumulate(self, weight: Any) -> bool | None:
        """Whether the weight's gradient adds to ``main_grad``; None if it does not go there."""
        is_first = self.is_first_microbatch
        if is_first:
            self.is_first_microbatch = False
        if not self.fuse_wgrad_accumulation:
            return None
        overwrites = is_first and not self.disable_parameter_transpose_cache
        return not (overwrites or getattr(weight, "overwrite_main_grad", False))


class ShortNormLinear(ShortLinear):
    """The short way of a linear layer that begins with an RMS norm."""

    eps: float
    zero_centered_gamma: bool
    fwd_ln_sm_margin: int
    inf_ln_sm_margin: int
    bwd_ln_sm_margin: int

    def product_and_norm(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor] | None:
        """Returns what a call does, and x (…, k) after the norm, for a wrapper; None if the short way does not suit.

        The norm is then a function of its own, since two products use it.
        """
        parameters = self._parameters
        if self.gemm_bias_unfused_add or not _goes_short(self, x, parameters.get("weight")):
            return None
        scale, weight, bias = (parameters.get(name) for name in ("layer_norm_weight", "weight", "bias"))
        normed: Tensor = NormAlone.apply(x.contiguous(), scale, self._norm())
        out: Tensor = Product.apply(normed, weight, bias if self.apply_bias else None, self._accumulate(weight))
        return out, bias if self.te_return_bias else None, normed

    def _norm(self) -> Norm:
        margin = self.fwd_ln_sm_margin if torch.is_grad_enabled() else self.inf_ln_sm_margin
        return Norm(self.eps, self.zero_centered_gamma, margin, self.bwd_ln_sm_margin)

    def _multiply(self, x: Tensor, weight: Any, bias: Any) -> Tensor:
        accumulate, scale = self._accumulate(weight), self._parameters["layer_norm_weight"]
        with_gradients, norm = torch.is_grad_enabled(), self._norm()
        if with_gradients:
            out: Tensor = NormProduct.apply(x, scale, weight, bias, norm, accumulate)
            return out
        assert scale is not None
        return _norm_product(x, scale, weight, bias, norm)[0]


def functions_are_known() -> bool:
    """True for versions of Transformer Engine whose C++ functions take the arguments that this module passes."""
    return importlib.metadata.version("transformer-engine").startswith("2.20.")


@functools.cache
def with_short_way(layer: type, way: type[ShortLinear] = ShortLinear) -> type:
    """Returns a class of linear layers with a short way.

    It keeps the name of the class, because megatron-core knows some layers by it.

    Args:
        layer: A linear layer of :mod:`megatron.core.extensions.transformer_engine`.
        way: :class:`ShortNormLinear` for a layer with a norm.
    """
    return type(layer.__name__, (way, layer), {})


def _goes_short(layer: ShortLinear, x: Tensor, weight: Any) -> bool:
    """True if a call needs nothing but products and a norm."""
    if type(weight) is not nn.Parameter:  # but quantised, a shard, or split into several
        return False
    if layer.may_go_short is None:
        layer.may_go_short = _may_go_short(layer)
    return (
        layer.may_go_short
        and x.dtype is weight.dtype
        and x.is_cuda is weight.is_cuda
        and x.dim() > 1
        and not torch.is_autocast_enabled()
        and not engine().quantizes()
    )


_OVERLAPS = (
    "ub_overlap_ag_fprop",
    "ub_overlap_rs_fprop",
    "ub_overlap_ag_dgrad",
    "ub_overlap_rs_dgrad",
    "ub_bulk_dgrad",
    "ub_bulk_wgrad",
)


def _may_go_short(layer: Any) -> bool:
    """Whether a layer's settings allow the short way. They are final once the layer is called."""
    config, weight = layer.config, layer.weight
    quantised = config.fp8 or config.fp4 or layer.te_quant_params is not None
    offloaded = config.cpu_offloading or config.fine_grained_activation_offloading
    # torch's FSDP2 gathers weights before a call; Transformer Engine treats only quantised ones differently then.
    sharded = layer.fsdp_group is not None
    spread = layer.tp_size > 1 or getattr(weight, "is_distributed_weight", False)
    later = layer.wgrad_store.delay_wgrad_compute() or any(getattr(layer, each) for each in _OVERLAPS)
    dtypes = {each.dtype for each in layer.parameters(recurse=False)}
    plain = layer.weight_names == ["weight"] and dtypes in ({torch.bfloat16}, {torch.float32})
    if isinstance(layer, ShortNormLinear):
        owner: Any = layer
        plain = plain and owner.normalization == "RMSNorm" and not owner.return_layernorm_output
    return plain and not (quantised or offloaded or sharded or spread or later or engine().is_instrumented())
