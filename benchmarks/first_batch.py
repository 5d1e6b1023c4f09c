"""Seconds from the start of a process to its first batch, and what of it is imports.

    python benchmarks/first_batch.py

Each way runs in a process of its own; the ways take turns, so that a busy machine slows all of them. Wall time and
CPU time (workers included) are medians over rounds. All files are in the page cache.
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

LOAD = (
    "from vlmdata import StreamingLoader; import sys; loader = StreamingLoader(sys.argv[1], capacity=1024, "
    "global_batch=4, num_workers={workers}); next(iter(loader)); loader.close()"
)
WAYS = {
    "import torch": "import torch",
    "import torch and the loader": "import torch; from vlmdata import StreamingLoader",
    "first batch, no workers": LOAD.format(workers=0),
    "first batch, 2 workers": LOAD.format(workers=2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    options = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory(prefix="vlmdata-bench-") as folder:
        data = write_dataset(Path(folder) / "data", shards=8, samples_per_shard=200)
        for number in range(options.rounds + 1):
            for name, code in WAYS.items():
                times = run(code, data)
                if number:  # the first round fills caches
                    found[name].append(times)
    text = report(found, options.rounds)
    print(text)
    (options.out / f"first-batch-{datetime.date.today().isoformat()}.md").write_text(text)


def run(code: str, data: Path) -> tuple[float, float]:
    """Wall and CPU seconds of a process."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-c", code, str(data)], check=True, cwd=ROOT)
    wall, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def report(found: dict[str, list[tuple[float, float]]], rounds: int) -> str:
    base = found["import torch"]
    lines = [
        "# Seconds to the first batch",
        "",
        f"`python benchmarks/first_batch.py --rounds {rounds}` on {datetime.date.today().isoformat()}: "
        f"{hardware('torch', 'numpy', 'pyarrow')}; load average "
        f"{os.getloadavg()[0]:.1f}. The end of the process is included.",
        "",
        "| from process start to | seconds | of `import torch` | CPU seconds | of `import torch` |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, times in found.items():
        wall = median(mine[0] / torch[0] for mine, torch in zip(times, base, strict=True))
        cpu = median(mine[1] / torch[1] for mine, torch in zip(times, base, strict=True))
        seconds, used = (median(each[i] for each in times) for i in range(2))
        lines.append(f"| {name} | {seconds:.2f} | {wall:.2f} | {used:.2f} | {cpu:.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
