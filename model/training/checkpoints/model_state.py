"""A model's parameters as megatron-core's checkpoints have them."""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state

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


def sharded_model(model: Any) -> dict[str, Any]:
    """Returns the parameters as in megatron-core's checkpoints, by name."""
    state: dict[str, Any] = model.sharded_state_dict(metadata=content())
    return state
