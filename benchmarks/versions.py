"""Two versions of vlmdata in turn: preprocessing, loading and planning, as ratios of what they take.

    git worktree add /tmp/before SOME_COMMIT
    python benchmarks/versions.py /tmp/before .

Each task runs in a process of its own with one version on its path, first the one and then the other, in every repeat.
Numbers are medians over the repeats, ratios medians of the ratios within a repeat. Data: the demo's receipts, which
each version preprocesses itself, and drawn lengths. Writes benchmarks/results/versions-<date>.json and .md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from hardware import hardware

RESULTS = Path(__file__).resolve().parent / "results"

#: Each program prints the seconds that a task took, for a data directory and a number of workers.
PREPROCESS = """
import shutil, sys, time
from vlmdata.cli.main import main
if __name__ == "__main__":  # worker processes import this file again
    data, workers = sys.argv[1:3]
    options = ["--limit", "{rows}", "--rows-per-shard", "16", "-j", workers]
    shutil.rmtree(data, ignore_errors=True)
    sys.argv = ["vlmdata", "preprocess", "demo", *options, "--out", data]
    begun = time.perf_counter()
    try:
        main()
    except SystemExit as end:
        assert not end.code, end.code
    print("took", time.perf_counter() - begun)
"""
LOAD = """
import sys, time
from vlmdata import StreamingLoader
data, workers = sys.argv[1:3]
if __name__ == "__main__":
    with StreamingLoader(data, capacity=8192, global_batch=1, num_workers=int(workers)) as loader:
        for batch in loader:
            pass  # now the shards are in the page cache, and the workers run
        begun, packs = time.perf_counter(), 0
        while time.perf_counter() - begun < {seconds}:
            for batch in loader:
                packs += 1
        print("took", (time.perf_counter() - begun) / packs)
"""
PLAN = """
import time
import numpy as np
from vlmdata.packing import PlanConfig, SampleTable, plan_epoch
drawn = np.random.default_rng(0)
lengths = drawn.lognormal(6.3, 1.1, {samples}).clip(16, 8192).astype(np.int32)
patches = np.where(drawn.random({samples}) < 0.5, lengths // 2, 0).astype(np.int32) * 4
table = SampleTable(
    lengths=lengths, num_targets=lengths - patches // 4, num_patches=patches,
    sum_patches_squared=patches.astype(np.int64) ** 2, shard=(np.arange({samples}) // 1000).astype(np.int32),
    dataset=np.zeros({samples}, np.int32),
)
begun = time.perf_counter()
plan_epoch(table, PlanConfig(8192, 64, alignment=16, max_patches={patches}), 0)
print("took", time.perf_counter() - begun)
"""


@dataclass(frozen=True)
class Task:
    """A program to time, with its number of workers."""

    name: str
    program: str
    workers: int = 0


def tasks(quick: bool) -> list[Task]:
    """What is compared."""
    preprocess = PREPROCESS.format(rows=16 if quick else 192)
    load, samples = LOAD.format(seconds=0.5 if quick else 3), 20_000 if quick else 400_000
    return [
        *(Task("preprocess the demo", preprocess, workers) for workers in (1, 4)),
        *(Task("load a pack of 8,192", load, workers) for workers in (0, 1, 4)),
        Task("plan packs", PLAN.format(samples=samples, patches=None)),
        Task("plan packs of two limits", PLAN.format(samples=samples, patches=20_000)),
    ]


def install_commands(version: Path, folder: Path) -> None:
    """Makes a version's entry points known, as ``pip install --no-deps`` would."""
    project = tomllib.loads((version / "pyproject.toml").read_text())["project"]
    info = folder / "vlmdata-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vlmdata\nVersion: 0\n")
    groups = project["entry-points"].items()
    lines = [line for group, points in groups for line in (f"[{group}]", *(f"{k} = {v}" for k, v in points.items()))]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def seconds(task: Task, version: Path, work: Path) -> float:
    """The time of a task with a version, in a process of its own; its shared libraries are in the page cache."""
    program = work / "task.py"
    program.write_text(task.program)
    path = os.pathsep.join([str(version), str(work / "commands"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(program), str(work / "data"), str(task.workers)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=work, env={**os.environ, "PYTHONPATH": path})
    if done.returncode:
        raise SystemExit(f"{task.name}, {version}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    return float(done.stdout.rsplit("took ", 1)[1])


def report(rows: list[dict[str, Any]], machine: dict[str, Any]) -> str:
    """The tables as Markdown."""
    lines = [
        f"# Two versions, {datetime.date.today().isoformat()}\n",
        ", ".join(f"{name} {value}" for name, value in machine.items()) + "\n",
        "| task | workers | before, s | after, s | after / before | least, most |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        ratios = [after / before for before, after in zip(row["before"], row["after"], strict=True)]
        lines.append(
            f"| {row['task']} | {row['workers']} | {median(row['before']):.4f} | {median(row['after']):.4f} "
            f"| **{median(ratios):.3f}** | {min(ratios):.3f}, {max(ratios):.3f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="Checkout of the first version.")
    parser.add_argument("after", type=Path, help="Checkout of the second version.")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="Little data, to see that it runs.")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    machine = hardware("torch", "numpy", "pyarrow")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        versions = {"before": given.before.resolve(), "after": given.after.resolve()}
        for name, version in versions.items():
            install_commands(version, Path(folder, name, "commands"))
        for task in tasks(given.quick):
            times: dict[str, list[float]] = {name: [] for name in versions}
            for repeat in range(given.repeats + 1):
                for name, version in versions.items():
                    took = seconds(task, version, Path(folder, name))
                    if repeat:  # the first one fills the caches
                        times[name].append(took)
            rows.append({"task": task.name, "workers": task.workers, **times})
            print(report(rows[-1:], machine).splitlines()[-1], flush=True)
    stem = given.out / f"versions-{datetime.date.today().isoformat()}"
    given.out.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".json").write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    stem.with_suffix(".md").write_text(report(rows, machine))


if __name__ == "__main__":
    main()
