"""A module whose gradients are chosen, and steps on it: what megatron-core's hooks may meet in a backward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

#: In which memory a gradient comes: its own, that of a large tensor, or with its axes swapped.
FORMS = ("own", "part", "turned")


@dataclasses.dataclass(frozen=True)
class Kind:
    """A parameter.

    Attributes:
        shape: Of it.
        dtype: Of it, and of its gradients.
        form: One of :data:`FORMS`.
        adds: Whether its layer adds the gradient to ``main_grad``, and returns one without meaning.
        zero: Whether that is 0 and must be added, as of a weight that two layers share.
        frozen: Whether it is not trained.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    form: str = "own"
    adds: bool = False
    zero: bool = False
    frozen: bool = False


class Use(torch.autograd.Function):
    """Returns a number. The gradient of the parameter is ``gradient``, in the kind's form."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor, kind: Kind, gradient: Tensor) -> Tensor:
        ctx.parameter, ctx.kind, ctx.gradient = parameter, kind, gradient
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        parameter, kind, gradient = ctx.parameter, ctx.kind, ctx.gradient.clone()
        if not ctx.needs_input_grad[1]:
            return grads[0], None, None, None
        if kind.adds:
            parameter.main_grad.add_(gradient)
            parameter.grad_added_to_main_grad = True
            return grads[0], torch.full_like(gradient, 0.0 if kind.zero else float("nan")), None, None
        if kind.form == "part":
            large = gradient.new_empty(1000 + gradient.numel())
            gradient = large[1000:].view_as(gradient).copy_(gradient)
        elif kind.form == "turned" and gradient.dim() == 2:
            gradient = gradient.T.contiguous().T
        return grads[0], gradient, None, None


def _use(x: Tensor, **used: Any) -> Tensor:
    out: Tensor = Use.apply(x, *used.values())
    return out


class Toy(nn.Module):
    """Uses parameters of some kinds in some order."""

    def __init__(self, kinds: Sequence[Kind]) -> None:
        super().__init__()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        generator = torch.Generator().manual_seed(0)
        self.kinds = kinds
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(kind.shape, generator=generator).to(self.device, kind.dtype), not kind.frozen)
            for kind in kinds
        )
        for weight, kind in zip(self.weights, kinds, strict=True):
            if kind.zero:
                weight.zero_out_wgrad = True

    def forward(self, uses: Sequence[tuple[int, bool]], generator: torch.Generator) -> Tensor:
        """Returns a number.

        Args:
            uses: Which parameter, and whether it is recomputed: it then gets its gradient in a pass of its own.
            generator: Of the gradients.
        """
        x = torch.ones((), device=self.device, requires_grad=True)
        for number, recomputed in uses:
            kind, weight = self.kinds[number], self.weights[number]
            gradient = torch.randn(kind.shape, generator=generator).to(self.device, kind.dtype)
            use = partial(_use, weight=weight, kind=kind, gradient=gradient)
            x = checkpoint(use, x, use_reentrant=True) if recomputed else use(x)
        return x


def wrapped(wrapper: type, kinds: Sequence[Kind], **options: Any) -> Any:
    """A toy in megatron-core's wrapper, or ours."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, calculate_per_token_loss=True)
    return wrapper(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, **options), Toy(kinds))


def step(chunk: Any, passes: Sequence[Sequence[tuple[int, bool]]], seed: int) -> list[Tensor]:
    """Computes the passes as megatron-core's schedules do, and reduces. Returns the gradients."""
    generator = torch.Generator().manual_seed(seed)
    chunk.zero_grad_buffer()
    with chunk.no_sync():
        for uses in passes[:-1]:
            chunk(uses, generator).backward()
    chunk(passes[-1], generator).backward()
    chunk.finish_grad_sync()
    trained = [each for each in chunk.parameters() if each.requires_grad]
    assert all(each.grad is None for each in trained)
    return [each.main_grad.clone() for each in trained]
