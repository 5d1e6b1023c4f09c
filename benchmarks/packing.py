"""Packing: fill against its lower bound and buffered first-fit-decreasing, plan time and memory, cost balance.

    python benchmarks/packing.py            # everything; some minutes
    python benchmarks/packing.py --quick    # a hundredth of the samples, to see that it runs

One core (the process pins itself). Lengths are drawn, not read: the distributions are below. Those of 626 real receipts
(`receipt_lengths.json`) are repeated. Writes
benchmarks/results/packing-<date>.json and .md, and prints the tables. Times are the least of three runs, each in a
fresh process; memory is how far planning drives up the process's resident memory, the sample table not counted (Linux).
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vlmdata.packing import PlanConfig, SampleTable, cost_model, plan_epoch, report_plan
from vlmdata.packing.alignment import aligned
from vlmdata.packing.patterns.histogram import STRATEGIES, pack_histogram
from vlmdata.packing.patterns.program_bound import program_bound

RESULTS = Path(__file__).resolve().parent / "results"
CAPACITY = 8192
BUFFER = 128
SHARD = 1000
GLOBAL_BATCH = 64
DP_SIZE = 8
RUNS = 3
SAMPLES = 1_000_000

# name -> (samples, shuffle_window, max_patches)
TIMED = {
    "1 M, global": (1_000_000, None, None),
    "10 M, global": (10_000_000, None, None),
    "1 M, global, max_patches 24,000": (1_000_000, None, 24_000),
    "10 M, global, max_patches 32,768 (never binds)": (10_000_000, None, 32_768),
    "10 M, global, max_patches 24,000": (10_000_000, None, 24_000),
    "1 M, windows of 16 shards": (1_000_000, 16, None),
    "10 M, windows of 16 shards": (10_000_000, 16, None),
    "1 M, windows of 16 shards, max_patches 24,000": (1_000_000, 16, 24_000),
}
REPEATS = (1, 4, 10, 16, 100, 1600)


def draw(name: str, count: int, seed: int = 0) -> SampleTable:
    """A table with one of three length distributions; images are single, 4 patches a token.

    receipts: an image of 900 to 976 tokens (four in five; the rest 400 to 900: max_pixels 1,003,520, as the real
        receipts in the tests' data come out) and 20 to 3,000 tokens of text, log-normal around 270.
    mixed: half receipts; half text or small images, log-normal around 250, 10 to 8,192 tokens.
    long-tailed: log-normal around 545 with sigma 1.1, 16 to 8,192 tokens; every second sample with an image of half
    that.
    """
    rng = np.random.default_rng(seed)
    large = np.where(rng.random(count) < 0.8, rng.integers(900, 977, count), rng.integers(400, 900, count))
    text = rng.lognormal(5.6, 0.6, count).clip(20, 3000).astype(np.int64)
    if name == "receipts":
        image, length = large, large + text
    elif name == "mixed":
        other = rng.lognormal(5.5, 0.9, count).clip(10, CAPACITY).astype(np.int64)
        small = np.where(rng.random(count) < 0.5, other // 2, 0)
        is_receipt = rng.random(count) < 0.5
        image, length = np.where(is_receipt, large, small), np.where(is_receipt, large + text, other)
    else:
        length = rng.lognormal(6.3, 1.1, count).clip(16, CAPACITY).astype(np.int64)
        image = np.where(rng.random(count) < 0.5, length // 2, 0)
    patches = (4 * image).astype(np.int32)
    return SampleTable(
        lengths=length.astype(np.int32),
        num_targets=(length - image).astype(np.int32),
        num_patches=patches,
        sum_patches_squared=patches.astype(np.int64) ** 2,
        shard=(np.arange(count) // SHARD).astype(np.int32),
        dataset=np.zeros(count, np.int32),
    )


def repeated_receipts(times: int) -> SampleTable:
    """The real receipts, several times over."""
    samples = json.loads((Path(__file__).parent / "receipt_lengths.json").read_text())["samples"]
    lengths, patches = np.tile(np.array(samples, np.int32).T, times)
    return SampleTable(
        lengths=lengths,
        num_targets=lengths - patches // 4,
        num_patches=patches,
        sum_patches_squared=patches.astype(np.int64) ** 2,
        shard=(np.arange(len(lengths)) // SHARD).astype(np.int32),
        dataset=np.zeros(len(lengths), np.int32),
    )


def buffered_first_fit_decreasing(lengths: npt.NDArray[np.int64], capacity: int, seed: int = 0) -> int:
    """Packs of the usual streaming packer: shuffle, fill a buffer of 128, first-fit-decreasing, emit all its packs."""
    shuffled = np.random.default_rng(seed).permutation(lengths)
    packs = 0
    for start in range(0, len(shuffled), BUFFER):
        rooms: list[int] = []
        for length in np.sort(shuffled[start : start + BUFFER])[::-1].tolist():
            for number, room in enumerate(rooms):
                if room >= length:
                    rooms[number] = room - length
                    break
            else:
                rooms.append(capacity - length)
        packs += len(rooms)
    return packs


def measure_fill(count: int) -> list[dict[str, Any]]:
    """Packs over the lower bound, ours and buffered, per distribution and alignment."""
    rows = []
    for name in ("receipts", "mixed", "long-tailed"):
        table = draw(name, count)
        for alignment in (1, 16):
            plan = plan_epoch(table, PlanConfig(CAPACITY, GLOBAL_BATCH, alignment=alignment), 0)
            lengths = aligned(table.lengths, alignment)
            bound = bounds(lengths, alignment)[1]
            buffered = buffered_first_fit_decreasing(lengths, CAPACITY)
            windowed = plan_epoch(table, PlanConfig(CAPACITY, GLOBAL_BATCH, alignment=alignment, shuffle_window=16), 0)
            rows.append(
                {
                    "lengths": name,
                    "alignment": alignment,
                    "samples": count,
                    "lower_bound": bound,
                    "packs": plan.num_packs,
                    "excess": plan.num_packs / bound - 1,
                    "windowed_excess": windowed.num_packs / bound - 1,
                    "buffered_packs": buffered,
                    "buffered_excess": buffered / bound - 1,
                    "fill": report_plan(plan).fill,
                    "naive_ratio": report_plan(plan).naive_ratio,
                }
            )
    return rows


def bounds(lengths: npt.NDArray[np.int64], alignment: int) -> tuple[int, int]:
    """Packs by volume, and by the linear program."""
    units = lengths // alignment
    room = CAPACITY // alignment
    return -(-int(units.sum()) // room), program_bound(*np.unique(units, return_counts=True), room)


def measure_real() -> list[dict[str, Any]]:
    """Real receipts: packs over the linear program's bound, and how long the plan takes."""
    rows = []
    for times in REPEATS:
        table = repeated_receipts(times)
        start = time.process_time()
        plan = plan_epoch(table, PlanConfig(CAPACITY, GLOBAL_BATCH), 0)
        seconds = time.process_time() - start
        volume, bound = bounds(table.lengths.astype(np.int64), 1)
        sizes, counts = np.unique(table.lengths, return_counts=True)
        greedy = min(pack_histogram(sizes[::-1], counts[::-1], CAPACITY, each).num_bins for each in STRATEGIES)
        rows.append(
            {
                "samples": len(table),
                "volume": volume,
                "lower_bound": bound,
                "packs": plan.num_packs,
                "excess": plan.num_packs / bound - 1,
                "greedy_packs": greedy,
                "greedy_excess": greedy / bound - 1,
                "cpu_seconds": seconds,
            }
        )
    return rows


def measure_two_limits(count: int) -> list[dict[str, Any]]:
    """Packs over the lower bound as the patch limit goes from never binding to deciding alone; 20 % text only."""
    table = draw("receipts", count)
    text_only = np.random.default_rng(1).random(count) < 0.2
    table = dataclasses.replace(
        table,
        num_patches=np.where(text_only, 0, table.num_patches).astype(np.int32),
        sum_patches_squared=np.where(text_only, 0, table.sum_patches_squared),
    )
    rows = []
    for max_patches in (32_768, 24_000, 20_480, 19_000, 18_000, 16_384, 8_192):
        plan = plan_epoch(table, PlanConfig(CAPACITY, GLOBAL_BATCH, max_patches=max_patches), 0)
        tokens = -(-int(table.lengths.sum()) // CAPACITY)
        patches = -(-int(table.num_patches.sum()) // max_patches)
        found = report_plan(plan)
        rows.append(
            {
                "max_patches": max_patches,
                "tokens_need": tokens,
                "patches_need": patches,
                "lower_bound": found.lower_bound,
                "packs": found.packs,
                "excess": found.excess,
            }
        )
    return rows


def measure_balance(count: int) -> list[dict[str, Any]]:
    """Maximum over mean of cost across ranks, in plan order and balanced."""
    rows = []
    for name in ("receipts", "mixed", "long-tailed"):
        table = draw(name, count)
        for preset in ("0.8b", "9b"):
            config = PlanConfig(CAPACITY, GLOBAL_BATCH, last="drop", cost=cost_model(preset))
            balance = report_plan(plan_epoch(table, config, 0), DP_SIZE).balance
            rows.append({"lengths": name, "preset": preset, **dataclasses.asdict(balance)})
    return rows


def resident(field: str) -> int:
    """Bytes of this process in memory now (VmRSS), or at most so far (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def child(name: str, scale: int) -> None:
    """One plan in a fresh process; prints JSON."""
    count, window, max_patches = TIMED[name]
    table = draw("receipts", count // scale)
    config = PlanConfig(CAPACITY, GLOBAL_BATCH, shuffle_window=window, max_patches=max_patches)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts over
    before = resident("VmRSS")
    start, cpu_start = time.perf_counter(), time.process_time()
    plan = plan_epoch(table, config, 0)
    result: dict[str, Any] = {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu_start,
        "packs": plan.num_packs,
        "steps": plan.num_steps,
        "peak_bytes": resident("VmHWM") - before,
        "plan_bytes": plan.samples.nbytes + plan.repeats.nbytes + plan.offsets.nbytes,
    }
    start = time.perf_counter()
    for step in range(100):
        plan.assignment(step % plan.num_steps, DP_SIZE)
    result["assignment_seconds"] = (time.perf_counter() - start) / 100
    print(json.dumps(result))


def measure_time(scale: int) -> list[dict[str, Any]]:
    """Plan time (least of three) and memory of every case, each run in a process of its own."""
    rows = []
    for name, (count, _, _) in TIMED.items():
        command = [sys.executable, __file__, "--child", name, "--scale", str(scale)]
        outputs = [subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(RUNS)]
        runs = [json.loads(output) for output in outputs]
        rows.append(
            {
                "case": name,
                "samples": count // scale,
                "seconds": min(r["seconds"] for r in runs),
                "cpu_seconds": min(r["cpu_seconds"] for r in runs),
                "all_seconds": [r["seconds"] for r in runs],
                "peak_bytes": max(r["peak_bytes"] for r in runs),
                "plan_bytes": runs[0]["plan_bytes"],
                "assignment_seconds": min(r["assignment_seconds"] for r in runs),
                "packs": runs[0]["packs"],
            }
        )
        print(f"  {name}: {rows[-1]['seconds']:.2f} s, {rows[-1]['peak_bytes'] / 1e6:.0f} MB", file=sys.stderr)
    return rows


def hardware() -> dict[str, Any]:
    """What the numbers were measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "cores_used": 1,
        "memory_gib": round(memory / 2**30, 1),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "numpy": np.__version__,
        "system": platform.platform(),
    }


def table_text(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def fill_section(rows: list[dict[str, Any]]) -> str:
    header = ["lengths", "alignment", "packs", "lower bound", "over it", "over it, windows of 16,000 samples"]
    header += [f"over it, first-fit-decreasing in buffers of {BUFFER}", "naive padded tokens / ours"]
    lines = []
    for r in rows:
        line = [r["lengths"], str(r["alignment"]), f"{r['packs']:,}", f"{r['lower_bound']:,}", f"{r['excess']:.3%}"]
        lines.append([*line, f"{r['windowed_excess']:.3%}", f"{r['buffered_excess']:.2%}", f"{r['naive_ratio']:.2f}"])
    return f"## Packs over the lower bound ({rows[0]['samples']:,} samples)\n\n" + table_text(header, lines)


def real_section(rows: list[dict[str, Any]]) -> str:
    header = ["samples", "by volume", "lower bound", "packs", "over it", "best fit", "over it", "plan, CPU seconds"]
    lines = [
        [
            *(f"{r[name]:,}" for name in ("samples", "volume", "lower_bound", "packs")),
            f"{r['excess']:.2%}",
            f"{r['greedy_packs']:,}",
            f"{r['greedy_excess']:.2%}",
            f"{r['cpu_seconds']:.2f}",
        ]
        for r in rows
    ]
    title = (
        "## 626 real receipts, repeated\n\n"
        "Lower bound: the linear program over all patterns. Best fit: the best of the planner's strategies without it."
    )
    return title + "\n\n" + table_text(header, lines)


def two_limits_section(rows: list[dict[str, Any]]) -> str:
    header = ["max_patches", "packs that tokens need", "packs that patches need", "packs", "over the lower bound"]
    names = ("max_patches", "tokens_need", "patches_need", "packs")
    lines = [[*(f"{r[name]:,}" for name in names), f"{r['excess']:.2%}"] for r in rows]
    title = (
        "## Two limits (receipts, one in five text-only)\n\n"
        "The lower bound is the greater of the linear programs of tokens and of patches alone. Where both bind it may "
        "be out of reach."
    )
    return title + "\n\n" + table_text(header, lines)


def time_section(rows: list[dict[str, Any]]) -> str:
    header = [
        "case",
        "seconds",
        "of them on the CPU",
        "peak MB",
        "plan itself, MB",
        f"assignment of a step of {GLOBAL_BATCH} packs, us",
    ]
    lines = []
    for r in rows:
        sizes = [f"{r['peak_bytes'] / 1e6:.0f}", f"{r['plan_bytes'] / 1e6:.0f}"]
        times = [f"{r['seconds']:.2f}", f"{r['cpu_seconds']:.2f}"]
        lines.append([r["case"], *times, *sizes, f"{r['assignment_seconds'] * 1e6:.0f}"])
    return "## Time and memory of one epoch's plan (receipts)\n\n" + table_text(header, lines)


def balance_section(rows: list[dict[str, Any]]) -> str:
    header = ["lengths", "cost model", "plan order", "balanced", "worst step, plan order", "worst step, balanced"]
    header += ["per micro-batch, plan order", "per micro-batch, balanced"]
    names = ["rank_before", "rank_after", "rank_before_worst", "rank_after_worst"]
    names += ["micro_batch_before", "micro_batch_after"]
    lines = [[r["lengths"], r["preset"], *(f"{r[name]:.3f}" for name in names)] for r in rows]
    title = f"## Cost across {DP_SIZE} ranks, global batch of {GLOBAL_BATCH} packs: maximum over mean\n\n"
    return title + table_text(header, lines)


def markdown(results: dict[str, Any]) -> str:
    hw = results["hardware"]
    machine = (
        f"{hw['cpu']}, one of {hw['cores']} cores (shared with other work, load {hw['load_average']:.1f}), "
        f"{hw['memory_gib']} GiB, Python {hw['python']}, numpy {hw['numpy']}. "
        f"Capacity {CAPACITY:,} tokens. Lengths are drawn; `benchmarks/packing.py` says how."
    )
    sections = [
        f"# Packing, {results['date']}",
        machine,
        fill_section(results["fill"]),
        real_section(results["real"]),
        two_limits_section(results["two_limits"]),
        time_section(results["time"]),
        balance_section(results["balance"]),
    ]
    return "\n\n".join(sections) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a hundredth of the samples; results are not written")
    parser.add_argument("--core", type=int, default=0, help="the core to run on")
    parser.add_argument("--child", choices=list(TIMED), help=argparse.SUPPRESS)
    parser.add_argument("--scale", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.scale)
        return
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {arguments.core})  # children inherit it
    scale = 100 if arguments.quick else 1
    results = {
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
        "time": measure_time(scale),
        "fill": measure_fill(SAMPLES // scale),
        "real": measure_real(),
        "two_limits": measure_two_limits(SAMPLES // scale),
        "balance": measure_balance(SAMPLES // scale),
    }
    text = markdown(results)
    print(text)
    if not arguments.quick:
        RESULTS.mkdir(parents=True, exist_ok=True)
        stem = RESULTS / f"packing-{results['date']}"
        stem.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        stem.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
