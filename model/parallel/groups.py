"""Process groups and random seeds of a parallel layout."""

from __future__ import annotations

import errno
import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from vlmdata.model.parallel.layout import require_layout


def initialize(
    *,
    tensor: int = 1,
    context: int = 1,
    pipeline: int = 1,
    expert: int = 1,
    vision: int = 0,
    vision_tensor: int = 1,
    backend: str | None = None,
    seed: int = 1234,
    timeout_minutes: float = 10.0,
) -> None:
    """Joins torchrun's process group or forms one alone, creates megatron-core's groups and sets the seeds.

    ``expert`` must divide data x context x tensor. ``vision`` ranks hold the vision tower and nothing else
    (:mod:`vlmdata.model.parallel.separation`), with a tensor-parallel size of their own; the other sizes are those of
    the other ranks. It is 0 if all ranks share one layout. The default ``backend`` is nccl with CUDA, else gloo. A
    collective waits ``timeout_minutes`` for a missing rank before the job fails.

    Raises:
        ValueError: If the number of processes is not a multiple of the layout's, or ``MASTER_PORT`` is in use.
        RuntimeError: If the groups already exist; call :func:`destroy` first.
    """
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        raise RuntimeError("the parallel groups already exist: call vlmdata.model.parallel.groups.destroy first")
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    layout = {"tensor": tensor, "context": context, "pipeline": pipeline, "expert": expert}
    require_layout(world, **layout, vision=vision, vision_tensor=vision_tensor)
    if torch.cuda.is_available():
        from vlmdata.model.parallel.environment import require_one_cudnn

        require_one_cudnn()
    if not dist.is_initialized():
        _join(backend or ("nccl" if torch.cuda.is_available() else "gloo"), world, timeout_minutes)
    sizes = {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "context_parallel_size": context,
        "expert_model_parallel_size": expert,
    }
    minutes = max(1, round(timeout_minutes))
    if vision:
        from vlmdata.model.parallel.separation import initialize_sides

        initialize_sides(vision, vision_tensor, sizes, minutes)
    else:
        parallel_state.initialize_model_parallel(
            **sizes, expert_tensor_parallel_size=1, distributed_timeout_minutes=minutes
        )
    seed_all(seed)


def seed_all(seed: int) -> None:
    """Seeds torch and megatron-core's random state tracker.

    Replicas (data- and context-parallel ranks) get equal streams, and pipeline stages get different ones.
    The ranks of a separate vision tower have streams of their own, like a further stage.
    Tensor-parallel ranks share torch's default stream, which initialises replicated parameters, and differ in the
    tracker's stream, which initialises sharded ones.
    """
    import random

    import numpy as np
    from megatron.core import parallel_state, tensor_parallel

    from vlmdata.model.parallel.separation import separation

    sides = separation()
    of_tower = sides is not None and sides.holds_tower
    stage = sides.pipeline if sides is not None and of_tower else parallel_state.get_pipeline_model_parallel_rank()
    stage_seed = seed + 100 * stage
    random.seed(stage_seed)
    np.random.seed(stage_seed % 2**32)  # noqa: NPY002  (libraries draw from the global state)
    torch.manual_seed(stage_seed)
    options: dict[str, Any] = {} if torch.cuda.is_available() else {"inference_rng_tracker": True}
    tensor_parallel.model_parallel_cuda_manual_seed(stage_seed, force_reset_rng=True, **options)


def destroy() -> None:
    """Leaves all groups; safe to call twice."""
    from megatron.core import parallel_state

    from vlmdata.model.parallel.separation import forget_separation

    forget_separation()
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def _join(backend: str, world: int, timeout_minutes: float) -> None:
    timeout = timedelta(minutes=timeout_minutes)
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "MASTER_ADDR" in os.environ:
        rank = int(os.environ.get("RANK", "0"))
        try:
            dist.init_process_group(backend, rank=rank, world_size=world, timeout=timeout)
        except dist.DistNetworkError as error:
            if not _port_is_taken(rank):
                raise
            raise ValueError(
                f"port {os.environ.get('MASTER_PORT')} of {os.environ['MASTER_ADDR']} is in use by another process: "
                "choose another with torchrun's --master-port or with MASTER_PORT"
            ) from error
        return
    if world != 1:
        raise ValueError(f"WORLD_SIZE is {world}, but MASTER_ADDR is not set: start the processes with torchrun")
    # A single process needs no port, so two runs on one machine cannot collide.
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not marked so
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)


def _port_is_taken(rank: int) -> bool:
    """Tells whether another process listens at ``MASTER_PORT``, where this rank would hold the store.

    torch's error has this only as text, so the port is tried. Under torchrun, the launcher holds the store.
    """
    if rank != 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return False
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch does: a port that was closed is free
        try:
            tried.bind(("", int(os.environ["MASTER_PORT"])))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False
