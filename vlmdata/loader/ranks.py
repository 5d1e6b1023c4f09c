"""Determines the data-parallel rank of a loader: from the caller, else from the process group."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch.distributed as dist

from vlmdata.errors import UsageError

_log = logging.getLogger("vlmdata.loader")
_told: set[DataParallel] = set()


@dataclass(frozen=True)
class DataParallel:
    """A data-parallel rank, from 0, and the number of ranks.

    ``source`` is their origin, "the process group" or the environment; empty if the caller gave them, or if there seems
    to be only one process.
    """

    rank: int
    size: int
    source: str = ""


def data_parallel(
    dp_rank: int | None, dp_size: int | None, context_parallel: int, tensor_parallel: int
) -> DataParallel:
    """Determines the data-parallel rank and size of a loader.

    Without either, every process of an initialised ``torch.distributed`` group is a separate data-parallel rank.
    Without a group, ``RANK`` and ``WORLD_SIZE`` of the environment (set by torchrun) are used. Rank 0 logs such
    defaults once.

    Raises:
        UsageError: If these are incompatible with each other or the process group, or the rank is unknown.
    """
    world = _world()
    if dp_rank is not None and dp_size is None:
        if world is not None and world.size > 1:
            raise UsageError(f"dp_rank {dp_rank} without dp_size: give both, or neither")
        dp_size = 1
    if dp_size is not None:
        found = _given(dp_rank, dp_size, context_parallel * tensor_parallel, world)
    else:
        found = _default(context_parallel, tensor_parallel, world)
    if found.source and found.rank == 0 and found not in _told:
        _told.add(found)
        _log.warning(
            "dp_rank and dp_size come from %s: each of the %d processes is a data-parallel rank and gets its own "
            "samples. Give both to override this.",
            found.source,
            found.size,
        )
    return found


def _given(dp_rank: int | None, dp_size: int, model_parallel: int, world: DataParallel | None) -> DataParallel:
    if dp_rank is None:
        if dp_size == 1:
            dp_rank = 0
        elif world is not None and world.size == dp_size:
            dp_rank = world.rank
        else:
            raise UsageError(f"dp_size {dp_size} without dp_rank: give both, or neither")
    found = given_data_parallel(dp_rank, dp_size)
    if world is not None and world.size > 1 and world.source == _GROUP:
        # Pipeline stages multiply these, so they need not be the whole world, but must divide it.
        if world.size % (dp_size * model_parallel):
            parallel = f" x {model_parallel} (context x tensor parallel)" if model_parallel > 1 else ""
            raise UsageError(
                f"dp_size {dp_size}{parallel} does not divide the {world.size} processes of the process group; leave "
                "dp_rank and dp_size out, or give those of this run"
            )
        if world.size == dp_size and dp_rank != world.rank:
            raise UsageError(
                f"dp_rank is {dp_rank}, but this is rank {world.rank} of {world.size} in the process group and dp_size "
                f"is {dp_size} too; leave both out, or give dp_rank={world.rank}"
            )
    return found


def given_data_parallel(dp_rank: int, dp_size: int) -> DataParallel:
    """Returns the rank and size that the caller gave, or raises a UsageError if the rank is out of range."""
    if dp_size < 1 or not 0 <= dp_rank < dp_size:
        raise UsageError(f"dp_rank {dp_rank} of dp_size {dp_size}: ranks count from 0 to dp_size - 1")
    return DataParallel(dp_rank, dp_size)


def _default(context_parallel: int, tensor_parallel: int, world: DataParallel | None) -> DataParallel:
    model_parallel = context_parallel * tensor_parallel
    if world is None or world.size in (1, model_parallel):
        return DataParallel(0, 1)
    if model_parallel > 1:
        raise UsageError(
            f"{world.source} has {world.size} processes, with context_parallel {context_parallel} and tensor_parallel "
            f"{tensor_parallel}: this does not determine the data-parallel rank; give dp_rank and dp_size"
        )
    return world


_GROUP = "the process group"


def _world() -> DataParallel | None:
    """Returns the processes of this program as ranks, if known."""
    if dist.is_available() and dist.is_initialized():
        return DataParallel(dist.get_rank(), dist.get_world_size(), _GROUP)
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None
    return DataParallel(rank, size, "RANK and WORLD_SIZE") if 0 <= rank < size else None
