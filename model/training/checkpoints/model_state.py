"""A model's parameters and the step counts of its optimizer as megatron-core's checkpoints have them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import merge
from megatron.core.dist_checkpointing.utils import extract_nonpersistent, extract_sharded_base

#: Sharding of the distributed optimizer's state; any layout can load it.
OPTIMIZER_FORMAT = "fully_reshardable"


def content() -> dict[str, Any]:
    """Returns the metadata that megatron-core needs to write and read the optimizer's state."""
    return {
        "distrib_optim_sharding_type": OPTIMIZER_FORMAT,
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def sharded_model(model: Any, whole: bool = False) -> dict[str, Any]:
    """Returns the parameters as in megatron-core's checkpoints, by name.

    Of a model with adapters, these are the trained ones only, unless it is wanted ``whole``.
    """
    state: dict[str, Any] = model.sharded_state_dict(metadata=content())
    if whole or not getattr(model, "adapted", False):
        return state
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name: entry for name, entry in state.items() if name in trained}


def with_common_state_of(sharded: dict[str, Any], rank: int) -> dict[str, Any]:
    """Returns a state whose values other than tensors are those of another rank. A collective.

    megatron-core writes these values of rank 0. A rank that trains nothing of a kind, such as a tower its experts, does
    not have the number of the optimizer's steps.
    """
    _, kept = extract_nonpersistent(sharded)
    tensors, common = extract_sharded_base(kept)
    box = [common]
    dist.broadcast_object_list(box, src=rank)
    merged: dict[str, Any] = merge(box[0], tensors)
    return merged
