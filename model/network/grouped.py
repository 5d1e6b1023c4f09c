"""Multiplies by the weights of all experts of a layer in one kernel.

The kernel needs the weights *in line*: at equal distances in memory, in the order of the experts.
:func:`lay_out_experts` puts them in line, and megatron-core's buffers keep them so. If they are not in line, or with
FP8, a layer calls Transformer Engine (docs/decisions/0117). That multiplies expert by expert, which takes the host
longer than the GPU; its single kernel for all experts needs cuBLAS 13.4 on Hopper. Weights in NF4 are in line while a
layer uses them.

Shapes: rows R (a token for each expert that it is sent to), experts E, input width k, output width n.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from torch import Tensor, nn

from vlmdata.model.network.quantized import STACKED, is_quantized

#: Attribute of a layer that :func:`lay_out_experts` put in line: a :class:`_Line`.
_LINE = "_weights_in_line"
#: Attribute of a layer's first weight: the other weights, if their gradients were added with its own. Autograd knows
#: only the first, because hooks of hundreds of weights take the host longer than the layer takes the GPU.
_COMPANIONS = "_companions"


@dataclass(frozen=True)
class ExpertRows:
    """Where each expert's rows end, int32 (E,), on the device: the number of rows up to and including its own."""

    ends: Tensor

    @classmethod
    def of(cls, counts: Any, device: torch.device) -> ExpertRows:
        """Makes an instance from the experts' numbers of rows, a tensor or a list. Returns an instance unchanged."""
        if isinstance(counts, ExpertRows):
            return counts
        return cls(torch.as_tensor(counts).cumsum(0).to(device, torch.int32, non_blocking=True))


@dataclass
class _Line:
    """The weights of a layer, and where they and their gradients are in memory."""

    weights: tuple[Any, ...]
    known: tuple[int, ...] = ()  # addresses at which the fields below were found
    whole: Tensor | None = None  # all weights, (E, n, k), or None if they are not in line
    places: Tensor | None = None  # addresses of their gradients, int64 (E,), on the device

    def look(self) -> None:
        """Updates the fields if weights or gradients have moved."""
        ends = (self.weights[0], self.weights[-1])
        gradients = [getattr(each, "main_grad", None) for each in ends]
        known = tuple(0 if each is None else each.data_ptr() for each in (*ends, *gradients))
        if known == self.known:
            return
        self.known, self.whole, self.places = known, _in_line([each.detach() for each in self.weights]), None
        if gradients[0] is not None:
            found = [each.main_grad for each in self.weights]
            if all(each.dtype is torch.float32 and each.is_contiguous() for each in found):
                self.places = torch.tensor([each.data_ptr() for each in found], device=ends[0].device)


def _in_line(weights: list[Tensor]) -> Tensor | None:
    """Returns weights (n, k) as a view (E, n, k), or None if they are not in line in one block of memory."""
    first = weights[0]
    size, starts = first.element_size(), [each.data_ptr() for each in weights]
    steps = {after - before for before, after in itertools.pairwise(starts)} or {first.numel() * size}
    memories = {each.untyped_storage().data_ptr() for each in weights}
    step = steps.pop()
    aligned = step % 16 == 0 and first.data_ptr() % 16 == 0 and first.stride(0) * size % 16 == 0
    if steps or step < first.numel() * size or len(memories) > 1 or not aligned or not first.is_contiguous():
        return None
    return first.as_strided((len(weights), *first.shape), (step // size, *first.stride()))


@torch.no_grad()
def lay_out_experts(model: nn.Module) -> None:
    """Puts the weights of each grouped layer of experts in line. Call it before the gradient buffers are made.

    The buffers take parameters from last to first, so each layer's parameters are reversed. Do not call it for fully
    sharded training, which moves weights itself.
    """
    for layer in _grouped_layers(model):
        weights = tuple(getattr(layer, f"weight{number}") for number in range(layer.num_gemms))
        if weights[0].is_meta or is_quantized(weights[0]):
            continue
        whole = torch.stack([each.detach() for each in weights])
        for weight, part in zip(weights, whole, strict=True):
            weight.data = part
        for number in reversed(range(len(weights))):
            layer._parameters[f"weight{number}"] = layer._parameters.pop(f"weight{number}")
        vars(layer)[_LINE] = _Line(weights)


def take_companions(weight: Any) -> tuple[Any, ...]:
    """Returns the weights whose gradients were added with this one's in the last backward pass, and forgets them."""
    found: tuple[Any, ...] = vars(weight).pop(_COMPANIONS, ())
    return found


def layers_out_of_line(model: nn.Module) -> int:
    """Counts the layers that :func:`lay_out_experts` put in line but that are no longer, so experts run one by one."""
    lines = [vars(layer)[_LINE] for layer in _grouped_layers(model) if _LINE in vars(layer)]
    for line in lines:
        line.look()
    return sum(line.whole is None for line in lines)


def _grouped_layers(model: nn.Module) -> Iterator[Any]:
    return (each for each in model.modules() if hasattr(each, "num_gemms") and hasattr(each, "weight0"))


def weights_in_line(layer: Any, x: Tensor) -> Tensor | None:
    """Returns a layer's weights, (E, n, k), if one kernel can multiply x (R, k) by all of them, else None."""
    config = layer.config
    if config.fp8 or config.fp4:
        return None
    whole: Tensor | None = vars(layer).get(STACKED)  # set during a call if weights are quantised
    line: _Line | None = vars(layer).get(_LINE)
    if whole is None and line is not None:
        line.look()
        trained = line.weights[0].requires_grad
        whole = None if trained and not (layer.fuse_wgrad_accumulation and line.places is not None) else line.whole
    return whole if whole is not None and x.dtype is whole.dtype else None


def grouped_product(layer: Any, x: Tensor, rows: ExpertRows, whole: Tensor) -> Tensor:
    """Multiplies each expert's rows of x (R, k) by its weight. Returns (R, n).

    The backward pass adds the gradients of trained weights to their ``main_grad``.
    """
    line: _Line | None = vars(layer).get(_LINE)
    if line is None or not line.weights[0].requires_grad or not torch.is_grad_enabled():
        return _product(x, rows, whole)
    out: Tensor = _TrainedProduct.apply(x, line.weights[0], rows, whole, line)
    return out


def _product(x: Tensor, rows: ExpertRows, whole: Tensor) -> Tensor:
    if not len(x):
        return F.linear(x, whole[0])
    return F.grouped_mm(x, whole.transpose(1, 2), offs=rows.ends)


class _TrainedProduct(torch.autograd.Function):
    """Products of x (R, k) with the experts' weights, whose gradients go to ``main_grad``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Any, rows: ExpertRows, whole: Tensor, line: _Line) -> Tensor:
        ctx.save_for_backward(x, whole)
        ctx.first, ctx.rows, ctx.line = first, rows, line
        return _product(x, rows, whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from vlmdata.model.kernels.expert_gradients import add_weight_gradients  # Triton is only available with CUDA

        x, whole = ctx.saved_tensors
        d, ends, line = grads[0].contiguous(), ctx.rows.ends, ctx.line
        dx = None
        if ctx.needs_input_grad[0]:
            dx = F.grouped_mm(d, whole, offs=ends) if len(d) else torch.zeros_like(x)
        add_weight_gradients(x.contiguous(), d, ends, line.places)
        # megatron-core's hook expects a gradient, so this returns one with arbitrary values.
        ctx.first.grad_added_to_main_grad = True
        setattr(ctx.first, _COMPANIONS, line.weights[1:])
        return dx, torch.empty_like(ctx.first), None, None, None


def may_pass_rows(experts: Any, x: Tensor) -> bool:
    """Whether both layers of a set of experts can use one kernel, with nothing but SwiGLU between them."""
    config = experts.config
    plain = config.bias_activation_fusion and config.gated_linear_unit and config.activation_func is F.silu
    plain = plain and not (experts.activation_recompute or config.moe_apply_probs_on_input or config.add_bias_linear)
    offloads = experts.offload_expert_fc1 or experts.offload_moe_act or config.use_te_activation_func
    layers = (experts.linear_fc1, experts.linear_fc2)
    return plain and not offloads and all(weights_in_line(each, x) is not None for each in layers)


def pass_rows(experts: Any, x: Tensor, counts: Any, shares: Tensor) -> tuple[Tensor, None]:
    """Maps rows (R, k) through their experts, weighted by shares (R,). The host does not wait for ``counts``."""
    rows = ExpertRows.of(counts, x.device)
    hidden, _ = experts.linear_fc1(x, rows)
    out, _ = experts.linear_fc2(weighted_bias_swiglu_impl(hidden, None, shares.unsqueeze(-1)), rows)
    return out, None
