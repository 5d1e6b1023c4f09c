"""A model with fully sharded parameters, as megatron-core's schedules, reductions and optimizers take it.

It stands where ``DistributedDataParallel`` stands otherwise. Its parameters are this rank's rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vlmdata.model.parallel.sharding import ParameterRows, shard_parameters


class ShardedModel(MegatronModule):
    """Shards a model, ``module``, and reduces its gradients. It computes in the dtype ``compute``.

    ``form`` is that of the optimizer's state in checkpoints: that of data parallelism on such a device
    (:func:`vlmdata.model.training.checkpoints.run_state.optimizer_form`). ``held`` are all parameters, with the rows of
    this rank. megatron-core reads attributes of ``ddp_config``.
    """

    def __init__(self, model: Any, compute: torch.dtype, device: torch.device) -> None:
        super().__init__(config=model.config)
        self.ddp_config = DistributedDataParallelConfig()
        if model.vision is not None:
            model.vision.take_first_weights()
        _take_first_replica(model)
        self.held: list[ParameterRows] = shard_parameters(model, compute, device)
        self.module, self.compute = model, compute
        wide, on_gpu = compute == torch.float32, device.type == "cuda"
        self.form = {"state": "plain" if wide and not on_gpu else "distributed", "weights": "fp32" if wide else "bf16"}

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """See the model's own."""
        return self.module(*inputs, **options)

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields this rank's rows of each parameter, if it holds any."""
        for own in self.held:
            if own.rows.numel():
                yield own.name, own.rows

    def zero_grad_buffer(self) -> None:
        """Forgets the gradients of the last step."""
        for own in self.held:
            own.parameter.grad = None
            for each in (own.rows, own.parameter):
                if hasattr(each, "main_grad"):
                    del each.main_grad

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Takes the gradients, which are already sums over all replicas and micro-batches, as ``main_grad``."""
        del force_all_reduce
        for own in self.held:
            if own.rows.requires_grad:
                found = own.parameter.grad
                local = torch.zeros_like(own.rows) if found is None else _local(found)
                own.rows.main_grad = own.parameter.main_grad = local  # type: ignore[attr-defined]

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiplies all gradients."""
        for own in self.held:
            if own.rows.requires_grad:
                own.rows.main_grad.mul_(factor)  # type: ignore[attr-defined]


def _local(gradient: Tensor) -> Tensor:
    assert isinstance(gradient, DTensor)
    return gradient.to_local()


@torch.no_grad()
def _take_first_replica(model: nn.Module) -> None:
    """Copies the weights of the first data-parallel rank to all."""
    dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
    spread = parallel_state.get_expert_data_parallel_group()
    for parameter in model.parameters():
        group = dense if getattr(parameter, "allreduce", True) else spread
        if group.size() > 1:
            dist.broadcast(parameter, group=group, group_src=0)
