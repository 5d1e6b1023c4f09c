"""Two versions of vlmdata in turn: preprocessing, loading and planning, as ratios of the time they take.

    git worktree add /tmp/before SOME_COMMIT
    python benchmarks/versions.py /tmp/before .

Each task runs in a process of its own with one version on its path, first the one and then the other, in every repeat.
Numbers are medians over the repeats, ratios medians of the ratios within a repeat. CPU time is that of all processes of
a task, user and system; it is what to read where other work shares the cores. Data: receipts and drawn chats, which
each version preprocesses itself, and drawn lengths. Writes benchmarks/results/versions-<date>.json and .md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from hardware import hardware
from long_tailed_chats import chats

CHATS = "chats.jsonl"
RESULTS = Path(__file__).resolve().parent / "results"

#: Before each program: it calls `begin`, does the work, and calls `end` with how often it did it.
CLOCK = """
import os, shutil, sys, time
if __name__ == "__main__":  # worker processes import this file again
    data, workers, source = sys.argv[1], int(sys.argv[2]), sys.argv[3]

def cpu():
    # of this task's processes, which are a session, and of those that they have waited for
    ticks = 0
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                stat = file.read().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(stat[3]) == os.getsid(0):
            ticks += sum(map(int, stat[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")

def begin():
    global begun
    begun = cpu(), time.perf_counter()

def end(times=1):
    wall = time.perf_counter() - begun[1]
    print("took", (cpu() - begun[0]) / times, wall / times)
"""
IMPORT = """
begin()
from vlmdata import StreamingLoader
end()
"""
PREPROCESS = """
from vlmdata.cli.main import main
if __name__ == "__main__":
    shutil.rmtree(data, ignore_errors=True)
    options = ["--limit", "{rows}", "--rows-per-shard", "{shard}", "-j", str(workers), "--tokenizer", "embedded"]
    sys.argv = ["vlmdata", "preprocess", source, *options, "--out", data]
    begin()
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, stop.code
    end()
"""
LOAD = """
from vlmdata import StreamingLoader
if __name__ == "__main__":
    with StreamingLoader(data, capacity=8192, global_batch=1, num_workers=workers) as loader:
        for batch in loader:
            pass  # now the shards are in the page cache, and the workers run
        packs, until = 0, time.perf_counter() + {seconds}
        begin()
        while time.perf_counter() < until:
            for batch in loader:
                packs += 1
        end(packs)
"""
PLAN = """
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
begin()
plan_epoch(table, PlanConfig(8192, 64, alignment=16, max_patches={patches}), 0)
end()
"""


@dataclass(frozen=True)
class Task:
    """A program to time, with its number of workers and the source of its data."""

    name: str
    program: str
    workers: int = 0
    source: str = ""

    @property
    def data(self) -> str:
        """The folder of the dataset made of the source."""
        return "chats" if self.source == CHATS else "receipts"


def load_program(quick: bool) -> str:
    """Loads for some seconds."""
    return LOAD.format(seconds=0.5 if quick else 3)


def dataset_task(quick: bool, source: str, workers: int = 1) -> Task:
    """Preprocesses a source."""
    rows, shard = (3000, 500) if source == CHATS else (192, 16)
    name = f"preprocess {'chats' if source == CHATS else 'receipts'}"
    return Task(name, PREPROCESS.format(rows=16 if quick else rows, shard=shard), workers, source)


def tasks(quick: bool, receipts: str) -> list[Task]:
    """What is compared."""
    load, samples = load_program(quick), 20_000 if quick else 1_000_000
    return [
        Task("import the loader", IMPORT),
        Task("preprocess 1 receipt", PREPROCESS.format(rows=1, shard=16), 1, receipts),
        *(dataset_task(quick, receipts, workers) for workers in (1, 4)),
        *(Task("load a pack of receipts", load, workers, receipts) for workers in (0, 1, 4)),
        *(dataset_task(quick, CHATS, workers) for workers in (1, 4)),
        *(Task("load a pack of chats", load, workers, CHATS) for workers in (0, 1)),
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


@dataclass
class Times:
    """Seconds of a version, one number for each repeat."""

    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)


def seconds(task: Task, version: Path, work: Path) -> tuple[float, float]:
    """CPU and wall-clock time of a task with a version, in processes of its own."""
    program = work / "task.py"
    program.write_text(CLOCK + task.program)
    path = os.pathsep.join([str(version), str(work / "commands"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(program), str(work / task.data), str(task.workers), task.source]
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=work, env=environment, start_new_session=True)
    if done.returncode:
        raise SystemExit(f"{task.name}, {version}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    cpu, wall = map(float, done.stdout.rsplit("took ", 1)[1].split())
    return cpu, wall


def ratio(before: list[float], after: list[float]) -> str:
    """Median of the ratios within a repeat, with the least and the largest."""
    ratios = [b / a for a, b in zip(before, after, strict=True)]
    return f"**{median(ratios):.3f}** | {min(ratios):.2f}, {max(ratios):.2f}"


def report(rows: list[dict[str, Any]], machine: dict[str, Any], command: str) -> str:
    """The table as Markdown."""
    lines = [
        f"# Two versions, {datetime.date.today().isoformat()}\n",
        f"`{command}`, {', '.join(f'{name} {value}' for name, value in machine.items())}\n",
        "CPU time of all processes of a task, and time by the clock; medians, and medians of the ratios.\n",
        "| task | workers | CPU before, s | after, s | ratio | least, most "
        "| clock before, s | after, s | ratio | least, most |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        before, after = row["before"], row["after"]
        cells = [
            f"{median(before[clock]):.4f} | {median(after[clock]):.4f} | {ratio(before[clock], after[clock])}"
            for clock in ("cpu", "wall")
        ]
        lines.append(f"| {row['task']} | {row['workers']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="Checkout of the first version.")
    parser.add_argument("after", type=Path, help="Checkout of the second version.")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--receipts", default="demo", help="A source with the columns of CORD-V2.")
    parser.add_argument(
        "--tasks",
        default=".*",
        help="Only tasks that this pattern matches whole, as in 'plan.*'; with workers: 'load a pack of chats, 1'.",
    )
    parser.add_argument("--quick", action="store_true", help="Little data, to see that it runs.")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    machine = hardware("torch", "numpy", "pyarrow")
    receipts = given.receipts if given.receipts == "demo" else str(Path(given.receipts).resolve())
    command = f"python benchmarks/versions.py BEFORE AFTER --repeats {given.repeats}"
    rows: list[dict[str, Any]] = []
    stem = given.out / f"versions-{datetime.date.today().isoformat()}"
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        versions = {"before": given.before.resolve(), "after": given.after.resolve()}
        for name, version in versions.items():
            install_commands(version, Path(folder, name, "commands"))
            texts = chats(100 if given.quick else 3000)
            Path(folder, name, CHATS).write_text("".join(json.dumps(row) + "\n" for row in texts))
        for task in tasks(given.quick, receipts):
            if not re.fullmatch(given.tasks, f"{task.name}, {task.workers}"):
                continue
            for name, version in versions.items():
                if task.program == load_program(given.quick) and not Path(folder, name, task.data).exists():
                    seconds(dataset_task(given.quick, task.source), version, Path(folder, name))
            times = {name: Times() for name in versions}
            for repeat in range(given.repeats + 1):
                for name, version in versions.items():
                    cpu, wall = seconds(task, version, Path(folder, name))
                    if repeat:  # the first one fills the caches
                        times[name].cpu.append(cpu)
                        times[name].wall.append(wall)
            rows.append({"task": task.name, "workers": task.workers, **{k: vars(v) for k, v in times.items()}})
            print(report(rows[-1:], machine, command).splitlines()[-1], flush=True)
            stem.with_suffix(".json").write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
            stem.with_suffix(".md").write_text(report(rows, machine, command))


if __name__ == "__main__":
    main()
