"""Time and CPU time of ``vlmdata preprocess``: before the first row, and for each row with one and two workers.

``python preprocess_start.py RECEIPTS.parquet --before TREE`` runs the installed command, and the same command on the
packages of another checkout, in turn. ``side`` is two commands of one worker each, started together on half of the
rows: what two workers could reach at most. Time before the first row ends when a shard is begun. Each command runs
once unmeasured, and Python keeps the bytecode of packages, as it does for users.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq
from hardware import hardware

COMMAND = Path(sys.executable).absolute().with_name("vlmdata")
#: Rows of the two commands whose difference is that of rows.
FEW, MANY = 106, 636
WORKERS = (1, 2)
#: Commands and workers of each.
WAYS = {"one worker": (1, 1), "two workers": (1, 2), "two commands": (2, 1)}
_BECOME_PARENT_OF_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER: the CPU time of the worker server is counted, too


def measure(sources: list[Path], workers: int, tokenizer: str, tree: Path | None) -> tuple[float, float, float]:
    """Runs a command for each source at once. Returns seconds to the first row and to the end, and CPU seconds."""
    with TemporaryDirectory() as work:  # not this folder, whose preprocess.py the worker server would import
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment |= {"PYTHONPATH": str(tree)} if tree else {}
        before, begun, first = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter(), 0.0
        running = []
        for number, source in enumerate(sources):
            options = ["--tokenizer", tokenizer, "-j", str(workers), "--out", f"{work}/{number}"]
            command = [str(COMMAND), "preprocess", str(source), *options]
            running.append(
                subprocess.Popen(
                    command, cwd=work, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
            )
        while any(each.poll() is None for each in running):
            if not first and any(Path(work).rglob("*shard-*")):
                first = time.perf_counter() - begun
            time.sleep(0.01)
        seconds = time.perf_counter() - begun
        if any(each.returncode for each in running):
            raise SystemExit("a command failed")
        _wait_for_orphans()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return first, seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _wait_for_orphans() -> None:
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("receipts", type=Path)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--tokenizer", action="append")
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    ctypes.CDLL(None).prctl(_BECOME_PARENT_OF_ORPHANS, 1, 0, 0, 0)
    print(hardware(), f"load {os.getloadavg()[0]:.1f}", flush=True)
    with TemporaryDirectory() as folder:
        table = pq.read_table(given.receipts)
        files = {rows: Path(folder) / f"{rows}.parquet" for rows in (1, FEW // 2, FEW, MANY // 2, MANY)}
        for rows, file in files.items():
            many = pa.concat_tables([table] * -(-rows // len(table))).slice(0, rows)
            pq.write_table(many, file, row_group_size=16)
        for tokenizer in given.tokenizer or ["embedded"]:
            for tree in filter(None, [given.before, Path(__file__).parents[1]]):
                for workers in WORKERS:
                    runs = [measure([files[1]], workers, tokenizer, tree) for _ in range(1 + given.rounds)]
                    first, seconds, cpu = map(min, zip(*runs[1:], strict=True))
                    which = "before" if tree == given.before else "now"
                    print(f"| {Path(tokenizer).name}, {which} | {workers} | {first:.2f} | {seconds:.2f} | {cpu:.2f} |")
                    sys.stdout.flush()
        _rows(files, given.rounds)


def _rows(files: dict[int, Path], rounds: int) -> None:
    """Prints time and CPU time for each row after the start: the difference between MANY rows and FEW."""
    for _ in range(rounds):
        for name, (commands, workers) in WAYS.items():
            small, large = (
                measure([files[rows // commands]] * commands, workers, "embedded", None) for rows in (FEW, MANY)
            )
            wall, cpu = ((large[n] - small[n]) / (MANY - FEW) * 1000 for n in (1, 2))
            print(f"| {name} | {small[1]:.1f} | {large[1]:.1f} | {wall:.1f} | {cpu:.1f} | {os.getloadavg()[0]:.1f} |")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
