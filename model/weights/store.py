"""Writes megatron-core's distributed checkpoint format without CUDA, and tensors that are made while they are written.

megatron-core's own writer synchronises CUDA streams. On machines without CUDA, torch's writer runs instead, driven by
megatron-core's planner. The files have the same format, and either side reads both.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save

#: Most files that a rank writes at once. Four take half the time of one, or less, where the disk is not what limits.
WRITERS = 4
#: Bytes for which another file pays: each is flushed to the disk.
BYTES_PER_WRITER = 64 << 20
_NOT_FLAT = {"flatten_state_dict": False, "flatten_sharded_tensors": False}


class HostSaveStrategy(torch_strategies.TorchDistSaveShardedStrategy):
    """Saves synchronously through ``torch.distributed.checkpoint``."""

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path | str) -> None:
        """Writes this rank's shards. All ranks must call it."""
        main = self.keep_only_main_replica
        planner = torch_strategies.MCoreSavePlanner(dedup_replicated_tensors=not main, **_NOT_FLAT)
        _save(sharded_state_dict, main, FileSystemWriter(checkpoint_dir, thread_count=self.thread_count), planner)


class StreamingSave(torch_strategies.TorchDistSaveShardedStrategy):
    """Saves a state dict without holding it in memory: requests each piece when writing it."""

    def __init__(self, resolve: Callable[[MetadataIndex], Tensor]):
        super().__init__()
        self._resolve = resolve

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path | str) -> None:
        """Writes all pieces to one file."""
        writer = FileSystemWriter(checkpoint_dir, single_file_per_rank=True, thread_count=1)
        _save(sharded_state_dict, False, writer, _StreamingPlanner(self._resolve))


class _StreamingPlanner(torch_strategies.MCoreSavePlanner):
    def __init__(self, resolve: Callable[[MetadataIndex], Tensor]):
        super().__init__(dedup_replicated_tensors=False, **_NOT_FLAT)
        self._resolve = resolve

    def resolve_data(self, write_item: WriteItem) -> Any:
        found = super().resolve_data(write_item)
        return self._resolve(write_item.index) if isinstance(found, Tensor) else found


def _save(state: ShardedStateDict, main: bool, writer: FileSystemWriter, planner: Any) -> None:
    by_key, _, _ = torch_strategies._replace_state_dict_keys_with_sharded_keys(state, main)
    save(torch_strategies.mcore_to_pyt_state_dict(by_key, False), storage_writer=writer, planner=planner)


def save_strategy(size: int) -> torch_strategies.TorchDistSaveShardedStrategy:
    """Returns the save strategy on this machine for a rank that writes about ``size`` bytes."""
    kind = torch_strategies.TorchDistSaveShardedStrategy if torch.cuda.is_available() else HostSaveStrategy
    return kind(thread_count=min(WRITERS, 1 + size // BYTES_PER_WRITER))
