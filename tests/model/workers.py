"""Four gloo processes that start once and run any number of layouts: importing megatron-core is what costs."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import queue
import socket
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
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._tasks = [context.Queue() for _ in range(WORLD)]
        self._results = context.Queue()
        self._processes = [
            context.Process(target=_serve, args=(rank, port, self._tasks[rank], self._results), daemon=True)
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
        for tasks in self._tasks:
            tasks.put((task, args))
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


def _serve(rank: int, port: int, tasks: Any, results: Any) -> None:
    faulthandler.enable()
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(WORLD),
        "OMP_NUM_THREADS": "1",
    }
    import torch

    from model.parallel import cpu_mode

    torch.set_num_threads(1)
    with cpu_mode.cpu_as_cuda():
        while True:
            task, args = tasks.get()
            try:
                results.put((rank, None, task(*args)))
            except BaseException:
                results.put((rank, traceback.format_exc(), None))
