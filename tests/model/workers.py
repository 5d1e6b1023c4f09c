"""Runs a function in several gloo processes at once."""

from __future__ import annotations

import faulthandler
import gc
import itertools
import multiprocessing
import os
import pickle
import queue
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORLD = 4
#: A layout takes a second or two; a hung collective is an error, not a wait.
PATIENCE = 500.0

#: In a process: where all meet, how often they did, its number, and how many they are.
_meetings, _numbers, _rank, _all = "", itertools.count(), 0, 0


def run_in_all(task: Callable[..., Any], *args: Any, world: int = WORLD) -> list[Any]:
    """Calls a module-level function in every process.

    They are forked from one that has megatron-core, and end with the call: process groups that something still holds
    would keep their threads, which wake up all the time.

    Args:
        task: The function.
        args: Its arguments.
        world: Processes.

    Returns:
        What each returned, by rank.

    Raises:
        AssertionError: If any failed, with all tracebacks, or did not answer in time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.model.preloaded"])
    results = context.Queue()
    answers: dict[int, bytes] = {}
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        given = (world, str(Path(folder) / "store"), task, args, results)
        processes = [context.Process(target=_call, args=(rank, *given), daemon=True) for rank in range(world)]
        for process in processes:
            process.start()
        try:
            for _ in range(world):
                rank, failure, answer = results.get(timeout=PATIENCE if not failures else 5.0)
                answers[rank] = answer
                if failure:
                    failures.append(f"rank {rank}: {failure}")
        except queue.Empty:
            failures.append(f"only ranks {sorted(answers)} answered: a collective hangs")
        finally:
            for process in processes:
                process.kill()
                process.join()
    if failures:
        raise AssertionError("\n".join(failures))
    return [pickle.loads(answers[rank]) for rank in range(world)]


def meet_again(world: int | None = None) -> bool:
    """Leaves all groups and joins a new one: what would be left of groups takes most of the time.

    Args:
        world: Processes of the new group, the first ones; all if None.

    Returns:
        Whether this process is one of them. It is in no group otherwise, and waits for the others when it calls this
        function again.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state

    from vlmdata.model.parallel.separation import forget_separation

    forget_separation()
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    gc.collect()  # of models, which hold groups
    gc.freeze()  # what is left is modules, which no later collection need look through
    return _meet(world or _all)


def _meet(world: int) -> bool:
    import torch.distributed as dist

    place = f"{_meetings}-{next(_numbers)}"
    if _rank >= world:
        return False
    dist.init_process_group("gloo", store=dist.FileStore(place, world), rank=_rank, world_size=world)
    return True


def _call(rank: int, world: int, meetings: str, task: Callable[..., Any], args: tuple[Any, ...], results: Any) -> None:
    global _meetings, _rank, _all
    faulthandler.enable()
    from vlmdata.model.parallel import cpu_mode

    _meetings, _rank, _all = meetings, rank, world
    try:
        with cpu_mode.cpu_as_cuda():
            _meet(world)
            # As bytes: tensors in shared memory would need this process to live until they are read.
            results.put((rank, None, pickle.dumps(task(*args))))
    except BaseException:
        results.put((rank, traceback.format_exc(), b""))
    results.close()
    results.join_thread()
    os._exit(0)  # at once, whether or not the others are still in a collective
