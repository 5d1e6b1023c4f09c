"""Four gloo processes that start once and run any number of layouts: importing megatron-core is what costs."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import queue
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

WORLD = 4
#: A layout takes a second or two; a hung collective is an error, not a wait.
PATIENCE = 240.0


class Workers:
    """The processes; tasks are module-level functions, called in all of them at once."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._stores = tempfile.TemporaryDirectory()
        self._count = 0
        self._tasks = [context.Queue() for _ in range(WORLD)]
        self._results = context.Queue()
        self._processes = [
            context.Process(target=_serve, args=(rank, self._tasks[rank], self._results), daemon=True)
            for rank in range(WORLD)
        ]
        for process in self._processes:
            process.start()

    def run(self, task: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls a function in every process.

        Returns:
            What each returned, by rank.

        Raises:
            AssertionError: If any failed, with all tracebacks, or did not answer in time; the next task gets new ones.
        """
        if not all(process.is_alive() for process in self._processes):
            self._start()
        self._count += 1
        for tasks in self._tasks:
            tasks.put((f"{self._stores.name}/{self._count}", task, args))
        answers: dict[int, Any] = {}
        failures = []
        for _ in range(WORLD):
            try:
                rank, failure, answer = self._results.get(timeout=PATIENCE if not failures else 5.0)
            except queue.Empty:
                break
            answers[rank] = answer
            if failure:
                failures.append(f"rank {rank}: {failure}")
        if failures or len(answers) < WORLD:
            self.close()
            raise AssertionError("\n".join(failures) or f"only ranks {sorted(answers)} answered: a collective hangs")
        return [answers[rank] for rank in range(WORLD)]

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._stores.cleanup()


def _serve(rank: int, tasks: Any, results: Any) -> None:
    """Runs tasks, each in a process group of its own: groups keep their threads until the last is left."""
    faulthandler.enable()
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    from model.parallel import cpu_mode, groups

    torch.set_num_threads(1)
    with cpu_mode.cpu_as_cuda():
        while True:
            store, task, args = tasks.get()
            try:
                dist.init_process_group("gloo", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD)
                answer = task(*args)
                groups.destroy()
                results.put((rank, None, answer))
            except BaseException:
                results.put((rank, traceback.format_exc(), None))
