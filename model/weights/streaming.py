"""Saves a distributed checkpoint whose tensors are made while they are written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save


class StreamingSave(torch_strategies.TorchDistSaveShardedStrategy):
    """Saves a state dict without holding it in memory: requests each piece when writing it."""

    def __init__(self, resolve: Callable[[MetadataIndex], Tensor]):
        super().__init__()
        self._resolve = resolve

    def save(self, sharded_state_dict: dict[str, ShardedBase], checkpoint_dir: Path | str) -> None:
        """Writes all pieces to one file."""
        by_key, _, _ = torch_strategies._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, False)
        save(
            torch_strategies.mcore_to_pyt_state_dict(by_key, False),
            storage_writer=FileSystemWriter(checkpoint_dir, single_file_per_rank=True, thread_count=1),
            planner=_StreamingPlanner(self._resolve),
        )


class _StreamingPlanner(torch_strategies.MCoreSavePlanner):
    def __init__(self, resolve: Callable[[MetadataIndex], Tensor]):
        super().__init__(dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False)
        self._resolve = resolve

    def resolve_data(self, write_item: WriteItem) -> Any:
        found = super().resolve_data(write_item)
        if isinstance(found, Tensor):
            return self._resolve(write_item.index)
        return found
