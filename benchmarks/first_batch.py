"""Seconds from the start of a process to its first batch, and what of it is imports.

    python benchmarks/first_batch.py [--data R --capacity 8192]

Each way runs in a process of its own; the ways take turns, so that a busy machine slows all of them. Wall time and
CPU time (workers included) are medians over rounds, and wall time from the import of the loader, torch being imported,
to the batch. All files are in the page cache.
Writes benchmarks/results/first-batch-<date>.md.
"""

from __future__ import annotations

import argparse
import datetime
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from hardware import hardware

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # benchmarks/preprocess.py has the name of a package

from tests.loader.synthetic import write_dataset

LOADER = "import sys, time, torch; begun = time.perf_counter(); from vlmdata import StreamingLoader; "
TOLD = "print(time.perf_counter() - begun); "
LOAD = (
    LOADER + "loader = StreamingLoader(sys.argv[1], capacity=int(sys.argv[2]), global_batch=4, num_workers={workers}); "
    "next(iter(loader)); " + TOLD + "loader.close()"
)
WAYS = {
    "import torch": "import torch; print(0)",
    "import torch and the loader": LOADER + TOLD,
    "first batch, no workers": LOAD.format(workers=0),
    "first batch, 2 workers": LOAD.format(workers=2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--data", help="a dataset; 1,600 synthetic texts by default")
    parser.add_argument("--capacity", type=int, default=1024)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    options = parser.parse_args()
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory(prefix="vlmdata-bench-") as folder:
        data = options.data or str(write_dataset(Path(folder) / "data", shards=8, samples_per_shard=200))
        for number in range(options.rounds + 1):
            for name, code in WAYS.items():
                times = run(code, data, options.capacity)
                if number:  # the first round fills caches
                    found[name].append(times)
    given = f" --data {Path(data).name} --capacity {options.capacity}" if options.data else ""
    text = report(found, f"--rounds {options.rounds}{given}")
    print(text)
    (options.out / f"first-batch-{datetime.date.today().isoformat()}.md").write_text(text)


def run(code: str, data: str, capacity: int) -> tuple[float, float, float]:
    """Wall and CPU seconds of a process, and the seconds that it prints."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-c", code, data, str(capacity)]
    done = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    wall, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, float(done.stdout)


def report(found: dict[str, list[tuple[float, float, float]]], arguments: str) -> str:
    base = found["import torch"]
    lines = [
        "# Seconds to the first batch",
        "",
        f"`python benchmarks/first_batch.py {arguments}` on {datetime.date.today().isoformat()}: "
        f"{hardware('torch', 'numpy', 'pyarrow')}; load average "
        f"{os.getloadavg()[0]:.1f}. The end of the process is included.",
        "",
        "| from process start to | seconds | of `import torch` | CPU seconds | of it | from the loader's import |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, times in found.items():
        wall = median(mine[0] / torch[0] for mine, torch in zip(times, base, strict=True))
        cpu = median(mine[1] / torch[1] for mine, torch in zip(times, base, strict=True))
        seconds, used, since = (median(each[i] for each in times) for i in range(3))
        lines.append(f"| {name} | {seconds:.2f} | {wall:.2f} | {used:.2f} | {cpu:.2f} | {since:.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
