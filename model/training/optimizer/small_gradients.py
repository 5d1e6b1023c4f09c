"""Gradients of small parameters, added to the float32 buffers in a few launches instead of hundreds.

Layers add the gradients of large weights to ``main_grad`` themselves. megatron-core adds the others one by one: those
of norms, biases, taps of convolutions, decay rates. At 0.8b that is 237 launches of a step, 1.7 ms of an H200.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from torch import Tensor, nn

from vlmdata.model.network.grouped import take_companions
from vlmdata.model.network.quantized import held_by

#: Bytes of a gradient's memory up to which it waits. A launch of its own costs a larger one nothing.
LARGEST = 2**20
#: Bytes of memory that gradients keep while they wait.
MOST = 2**25


class GradientBuffers(DistributedDataParallel):
    """megatron-core's, except that small gradients wait, and many are added together.

    They are added before a bucket is sent to other ranks, before the end of a step, when a parameter gets another
    gradient, and when too many wait. Each parameter's gradients are added in the order in which they are made, so sums
    have the same bits. There is one exception: if a gradient waits and a layer then adds another one of the same
    parameter to ``main_grad`` itself, the order changes. Sums of three or more gradients may then be rounded
    differently.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._small = SmallGradients()
        super().__init__(*arguments, **options)
        for group in self.bucket_groups + self.expert_parallel_bucket_groups:
            assert type(group) is _ParamAndGradBucketGroup
            group.__class__, group.small = _BucketGroup, self._small

    def _make_backward_post_hook(self, param: Any) -> Callable[..., None]:
        theirs: Callable[..., None] = super()._make_backward_post_hook(param)

        def hook(*_: Any) -> None:
            companions = take_companions(param)
            if self.ddp_config.overlap_grad_reduce:
                for each in companions:
                    self.param_to_bucket_group[each].register_grad_ready(each, self.force_all_reduce)
            gradient = param.grad
            # If a layer has added its gradient to main_grad itself, .grad is a placeholder, or what other layers
            # contribute to the same weight. megatron-core's hook tells these apart.
            if gradient is None or param.grad_added_to_main_grad or not self._small.take(param, gradient):
                theirs()
                return
            param.grad = None
            if self.ddp_config.overlap_grad_reduce:
                self.param_to_bucket_group[param].register_grad_ready(param, self.force_all_reduce)

        return hook

    def broadcast_params(self) -> None:
        """Makes all data-parallel ranks hold the same values; see megatron-core's.

        Of quantized weights, codes and scales are sent.
        """
        for parameter in self.module.parameters():
            group = self.dp_cp_group if getattr(parameter, "allreduce", True) else self.expt_dp_group
            for tensor in held_by(parameter):
                dist.broadcast(tensor, src=dist.get_global_rank(group, 0), group=group)

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Adds what waits and reduces, or waits for the reduction; see megatron-core's."""
        self._small.add()
        super().finish_grad_sync(force_all_reduce)

    def zero_grad_buffer(self) -> None:
        """Begins a step. What waits, of a pass that failed, is forgotten."""
        self._small.forget()
        super().zero_grad_buffer()


class SmallGradients:
    """Gradients that are not added to ``main_grad`` yet."""

    def __init__(self) -> None:
        self._waiting: dict[nn.Parameter, Tensor] = {}
        self._bytes = 0

    def take(self, parameter: nn.Parameter, gradient: Tensor) -> bool:
        """Keeps a gradient until :meth:`add`, or returns False if the caller must add it at once.

        A kept gradient is not copied, so nothing may write to its memory before :meth:`add`. Autograd does not, because
        the hook sets ``.grad`` to None. A replay of a CUDA graph would, and :meth:`add` does not wait for other
        streams than its own. So layers in CUDA graphs, or backward passes on several streams, must not use this class.
        """
        # One launch adds all, in no order, so only one may be of this parameter; and the first must come first.
        if parameter in self._waiting:
            self.add()
        size = gradient.untyped_storage().nbytes()  # a part of a large tensor keeps all of its memory
        if size > LARGEST:
            return False
        if self._bytes + size > MOST:
            self.add()
        self._waiting[parameter] = gradient
        self._bytes += size
        return True

    @torch.no_grad()
    def add(self) -> None:
        """Adds all that wait to the ``main_grad`` of their parameters."""
        by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for parameter, gradient in self._waiting.items():
            places, gradients = by_dtype.setdefault(gradient.dtype, ([], []))
            places.append(parameter.main_grad.view(-1))  # type: ignore[attr-defined]
            gradients.append(gradient.view(-1))
        for places, gradients in by_dtype.values():
            torch._foreach_add_(places, _of_dtype(gradients, places[0].dtype))
        self.forget()

    def forget(self) -> None:
        """Drops all that wait."""
        self._waiting.clear()
        self._bytes = 0


class _BucketGroup(_ParamAndGradBucketGroup):
    """Parameters whose gradients are sent to other ranks together."""

    small: SmallGradients

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Adds what waits, also of other groups, and sends."""
        self.small.add()
        super().start_grad_sync(force_all_reduce=force_all_reduce)


def _of_dtype(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Converts tensors (n,) of one dtype, in few launches. torch adds lists of mixed dtypes one by one."""
    if tensors[0].dtype == dtype:
        return tensors
    sizes = [each.numel() for each in tensors]
    converted = list(tensors[0].new_empty(sum(sizes), dtype=dtype).split(sizes))
    torch._foreach_copy_(converted, tensors)
    return converted
