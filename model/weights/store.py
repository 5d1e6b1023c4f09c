"""Writes megatron-core's distributed checkpoint format without CUDA.

megatron-core's own writer synchronises CUDA streams. On machines without CUDA, torch's writer runs instead, driven by
megatron-core's planner. The files have the same format, and either side reads both.
"""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

#: Most files that a rank writes at once. Four take half the time of one, or less, where the disk is not what limits.
WRITERS = 4
#: Bytes for which another file pays: each is flushed to the disk.
BYTES_PER_WRITER = 64 << 20


class HostSaveStrategy(torch_strategies.TorchDistSaveShardedStrategy):
    """Saves synchronously through ``torch.distributed.checkpoint``."""

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path | str) -> None:
        """Writes this rank's shards. All ranks must call it."""
        by_key, _, _ = torch_strategies._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        planner = torch_strategies.MCoreSavePlanner(
            dedup_replicated_tensors=not self.keep_only_main_replica,
            flatten_state_dict=False,
            flatten_sharded_tensors=False,
        )
        save(
            torch_strategies.mcore_to_pyt_state_dict(by_key, False),
            storage_writer=FileSystemWriter(checkpoint_dir, thread_count=self.thread_count),
            planner=planner,
        )


def save_strategy(size: int) -> torch_strategies.TorchDistSaveShardedStrategy:
    """Returns the save strategy for distributed checkpoints on this machine.

    Args:
        size: Bytes that a rank writes, roughly.
    """
    kind = torch_strategies.TorchDistSaveShardedStrategy if torch.cuda.is_available() else HostSaveStrategy
    return kind(thread_count=min(WRITERS, 1 + size // BYTES_PER_WRITER))
