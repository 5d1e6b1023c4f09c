"""The distributed optimizer's copies between its float32 weights and the model's, in one launch instead of hundreds.

megatron-core copies parameter by parameter, and computes their places in its buffers again in each step. At 0.8b that
is about 380 of the 3,900 launches of a step, and 3 % of the host's time, for which the GPU waits.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

#: Parts of parameters in the optimizer with what belongs to them; or parameters with those parts.
Pairs = list[tuple[Tensor, Tensor]]


def copy_weights_at_once(optimizer: ChainedOptimizer) -> None:
    """Has the distributed optimizers among these copy all weights together. Values are the same, bit by bit."""
    for each in optimizer.chained_optimizers:
        if type(each) is DistributedOptimizer:  # megatron-core's functions build the optimizer, of its own class
            each.__class__ = _DistributedOptimizer


class _DistributedOptimizer(DistributedOptimizer):
    """megatron-core's, with the places of all parts found once."""

    _found: tuple[tuple[int, ...], tuple[Pairs, Pairs, Pairs]] | None = None

    def _copy_model_grads_to_main_grads(self) -> None:
        """Gives each part its gradient, a view of the buffer, which is in float32."""
        if not self._is_plain():
            super()._copy_model_grads_to_main_grads()
            return
        for part, gradient in self._places()[0]:
            part.grad = gradient.float()

    def _copy_main_params_to_model_params(self) -> None:
        """Rounds the updated float32 weights to the model's."""
        if not self._is_plain():
            super()._copy_main_params_to_model_params()
            return
        for pairs in self._places()[1:]:
            if pairs:
                torch._foreach_copy_([weight for _, weight in pairs], [part for part, _ in pairs])

    def _is_plain(self) -> bool:
        """Whether weights are neither quantised nor kept by another part of megatron-core."""
        return not (
            self.is_stub_optimizer
            or self.ddp_config.use_megatron_fsdp
            or self.ddp_config.fp8_param_gather
            or self.ddp_config.fp4_param_gather
            or self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        )

    def _places(self) -> tuple[Pairs, Pairs, Pairs]:
        """Returns each part with its gradient, and parts with their model weights: of 16 bits and of float32."""
        half = _paired(self.model_float16_groups, self.shard_fp32_from_float16_groups)
        full = _paired(self.model_fp32_groups, self.shard_fp32_groups)
        buckets = [bucket for buffer in self.buffers for bucket in buffer.buckets]
        # Who loads a checkpoint may put other tensors in place of these.
        known = tuple(id(part) for _, part in half + full)
        known += tuple(data.data_ptr() for each in buckets for data in (each.param_data, each.grad_data))
        if self._found is None or self._found[0] != known:
            gradients = [(part, self._gradient(parameter, part)) for parameter, part in half + full]
            pairs = ([(part, self._weight(parameter, part)) for parameter, part in both] for both in (half, full))
            # A part of a float32 weight is the weight itself.
            apart = [
                [(part, weight) for part, weight in both if part.data_ptr() != weight.data_ptr()] for both in pairs
            ]
            self._found = known, (gradients, apart[0], apart[1])
        return self._found[1]

    def _gradient(self, parameter: Any, part: Tensor) -> Tensor:
        own = self._get_model_param_range_map(parameter)["param"]
        assert own.size == part.nelement()
        gradient: Tensor = parameter.main_grad.view(-1)[own.start : own.end]
        return gradient

    def _weight(self, parameter: Any, part: Tensor) -> Tensor:
        own = self._get_model_param_range_map(parameter)["gbuf_world_in_bucket"]
        assert own.size == part.nelement()
        number, _, bucket = self.model_param_gbuf_map[parameter]
        weight: Tensor = self.buffers[number].buckets[bucket].param_data.view(-1)[own.start : own.end]
        return weight


def _paired(parameters: list[list[Tensor]], parts: list[list[Tensor]]) -> Pairs:
    return [pair for both in zip(parameters, parts, strict=True) for pair in zip(*both, strict=True)]
