"""The part of a checkpoint that megatron-core takes from one rank: step counts and settings of the optimizer."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import merge
from megatron.core.dist_checkpointing.utils import extract_nonpersistent, extract_sharded_base


def with_common_state_of(sharded: dict[str, Any], rank: int) -> dict[str, Any]:
    """Returns a state whose values other than tensors are those of another rank. A collective.

    megatron-core writes these values of rank 0. A rank that trains nothing of a kind, such as a tower its experts, does
    not have the number of the optimizer's steps.

    Args:
        sharded: The state of this rank.
        rank: The other rank.
    """
    _, kept = extract_nonpersistent(sharded)
    tensors, common = extract_sharded_base(kept)
    box = [common]
    dist.broadcast_object_list(box, src=rank)
    merged: dict[str, Any] = merge(box[0], tensors)
    return merged
