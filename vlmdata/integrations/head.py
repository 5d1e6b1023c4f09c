"""The loss of each target from hidden states, without the logits of all targets in memory at once.

A vocabulary of 248,320 takes 0.95 MiB of float32 logits per target, several times over in a backward pass. Here a few
rows are computed at a time, and again in the backward pass. Gemma caps its logits: ``cap * tanh(logit / cap)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import linear

#: Logits that are computed at once: 1 GiB in float32.
LOGITS = 2**28


@contextmanager
def losses_for_logits(head: torch.nn.Module, labels: torch.Tensor, config: Any = None) -> Iterator[bool]:
    """Makes the output layer of a model return losses (1, N) in the place of logits (1, N, vocabulary).

    Only a plain linear layer does, without adapters, quantization or hooks, and not one that is sharded by itself.

    Args:
        head: The output layer.
        labels: int64 (N,), the targets of the hidden states that it gets.
        config: Configuration of the decoder. If it caps logits, it says meanwhile that it does not, since the model
            would cap losses.

    Yields:
        Whether it does.
    """
    if not _is_plain(head):
        yield False
        return
    losses: list[torch.Tensor] = []
    cap = getattr(config, "final_logit_softcapping", None)

    def before(module: Any, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        (hidden,) = args
        losses.append(linear_cross_entropy(hidden[0], module.weight, labels.to(hidden.device), cap)[None])
        return (hidden[:, :0],)

    def after(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return losses.pop()

    handles = [head.register_forward_pre_hook(before), head.register_forward_hook(after)]
    try:
        if cap is not None:
            config.final_logit_softcapping = None
        yield True
    finally:
        if cap is not None:
            config.final_logit_softcapping = cap
        for handle in handles:
            handle.remove()


def _is_plain(head: torch.nn.Module) -> bool:
    if type(head) is not torch.nn.Linear or type(head.weight) is not torch.nn.Parameter:
        return False
    bias: torch.Tensor | None = head.bias  # None without one, which its annotation does not say
    return bias is None and not (head._forward_pre_hooks or head._forward_hooks or "forward" in vars(head))


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, cap: float | None = None
) -> torch.Tensor:
    """Cross-entropy of linear logits, each by itself: float32 (N,).

    Args:
        hidden: (N, hidden).
        weight: (vocabulary, hidden).
        labels: int64 (N,).
        cap: Bound of the logits, if they are capped.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    losses: torch.Tensor = _LinearCrossEntropy.apply(hidden, weight, labels, cap)  # type: ignore[no-untyped-call]
    return losses


class _LinearCrossEntropy(torch.autograd.Function):
    """The gradients of a row of logits are its probabilities, less 1 at its label; times the slope of the cap."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, cap: float | None
    ) -> torch.Tensor:
        sums = [hidden.new_empty(0, dtype=torch.float32)]
        found = list(sums)
        for own, targets in _rows(weight, hidden, labels):
            logits = _logits(own, weight, cap)
            sums.append(logits.logsumexp(1))
            found.append(logits.gather(1, targets[:, None])[:, 0])
        log_sums = torch.cat(sums)
        ctx.save_for_backward(hidden, weight, labels, log_sums)
        ctx.cap = cap
        return log_sums - torch.cat(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, labels, log_sums = ctx.saved_tensors
        of_hidden, of_weight, *_ = ctx.needs_input_grad
        parts = [hidden.new_empty(0, hidden.shape[1])]
        total = torch.zeros_like(weight, dtype=torch.float32) if of_weight else None
        for own, targets, sums, gradient in _rows(weight, hidden, labels, log_sums, gradients[0]):
            logits = _logits(own, weight, ctx.cap)
            slope = None if ctx.cap is None else 1 - (logits / ctx.cap).square_()
            slopes = logits.sub_(sums[:, None]).exp_()
            slopes.scatter_add_(1, targets[:, None], slopes.new_full((len(targets), 1), -1.0))
            if slope is not None:
                slopes.mul_(slope)
            rounded = slopes.mul_(gradient[:, None]).to(weight.dtype)
            if of_hidden:
                parts.append(rounded @ weight)
            if total is not None:
                total += rounded.T @ own
        of_weights = None if total is None else total.to(weight.dtype)
        return torch.cat(parts) if of_hidden else None, of_weights, None, None


def _logits(hidden: torch.Tensor, weight: torch.Tensor, cap: float | None) -> torch.Tensor:
    logits = linear(hidden, weight).float()
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def _rows(weight: torch.Tensor, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Splits tensors into rows whose logits are computed at once."""
    length = max(1, LOGITS // len(weight))
    parts = [torch.split(tensor, length) for tensor in tensors] if len(tensors[0]) else []
    return zip(*parts, strict=True)
