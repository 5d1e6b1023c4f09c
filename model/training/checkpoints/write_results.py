"""The queue in which the processes that write a checkpoint report.

The process that holds it imports this module, so nothing heavy is imported here.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.managers import SyncManager

from vlmdata.model.training.processes.interruption import shielding_children


def start_write_results() -> None:
    """Starts the process that holds megatron-core's queue of results, unless it runs.

    megatron-core would start the same one, but that outlives a trainer that is killed.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is not None:
        return
    manager = SyncManager(ctx=multiprocessing.get_context("spawn"))
    with shielding_children():
        manager.start(_end_with_parent)
    filesystem_async._results_queue = manager.Queue()


def _end_with_parent() -> None:
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(0)
