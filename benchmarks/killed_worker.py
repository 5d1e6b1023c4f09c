"""How long a killed loader worker is missed: the longest wait for a batch after the kill, its replacement included.

    python benchmarks/killed_worker.py

The workers are stopped first, so that the wait begins while no batch is ready, and then one is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # benchmarks/preprocess.py has the name of a package

from tests.loader.synthetic import write_dataset
from vlmdata import StreamingLoader

ROUNDS = 5
#: More batches than two workers and the loader hold ahead.
AHEAD = 12


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="vlmdata-bench-") as folder:
        data = write_dataset(Path(folder) / "data", shards=8, samples_per_shard=16)
        found = [wait_after_kill(data) for _ in range(ROUNDS)]
    print(f"longest wait after a kill: median {median(found):.2f} s, most {max(found):.2f} s of {ROUNDS}")


def wait_after_kill(data: Path) -> float:
    """Seconds of the longest wait for one of the batches after a kill."""
    with StreamingLoader(data, capacity=1024, global_batch=1, max_patches=1024, num_workers=2) as loader:
        batches = iter(loader)
        next(batches)
        workers = [each for each in multiprocessing.active_children() if each.pid]
        for worker in workers:
            os.kill(worker.pid or 0, signal.SIGSTOP)
        os.kill(workers[0].pid or 0, signal.SIGKILL)
        os.kill(workers[1].pid or 0, signal.SIGCONT)
        waits = []
        for _ in range(AHEAD):
            begun = time.perf_counter()
            next(batches)
            waits.append(time.perf_counter() - begun)
        return max(waits)


if __name__ == "__main__":
    main()
