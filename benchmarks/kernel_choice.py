"""Times all configurations of the delta net's kernels, to check the table in model/kernels/configurations.py.

    python benchmarks/kernel_choice.py

For several numbers of heads (those of the presets, and of one under tensor parallelism), all configurations are
compiled in parallel, then Triton's autotuner times each. For each kernel, the configuration is chosen whose worst ratio
to the fastest, over the numbers of heads, is lowest. Prints the table, and the ratio of all kernels' time with the
choice to that with the fastest of each. Writes kernel-choice-<date>.json and .md under --out, anew after each number of
heads. It begins none for which the time until --limit may not suffice, and ends in any case 20 s after it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

from vlmdata.model.kernels.configurations import CANDIDATES, autotuners
from vlmdata.model.kernels.shapes import DecoderKernels, DeltaNetShape, Kernels

Timings = dict[str, dict[str, float]]  # milliseconds by kernel and configuration


def shape(key_heads: int, value_heads: int, tokens: int) -> DeltaNetShape:
    return DeltaNetShape(tokens, key_heads, value_heads, key_width=128, value_width=128, taps=4)


def compile_all(shapes: list[DeltaNetShape], limit: float) -> None:
    """Compiles all configurations for all shapes at once. What is not ready in time is compiled when it is timed."""
    commands = [Kernels(DecoderKernels(each, None), None, None, every=True).command() for each in shapes]
    running = [subprocess.Popen(each, cwd=ROOT, stdout=subprocess.PIPE, text=True) for each in commands]
    deadline = time.perf_counter() + limit
    for each, process in zip(shapes, running, strict=True):
        try:
            out = process.communicate(timeout=max(0.1, deadline - time.perf_counter()))[0]
        except subprocess.TimeoutExpired:
            process.terminate()
            out = process.communicate()[0]
        lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        kernels = [line["seconds"] for line in lines if "kernel" in line]
        print(f"{each}: {len(kernels)} compiled, {sum(kernels):.0f} s of CPU, exit {process.returncode}", flush=True)


def named(config: Any) -> str:
    return json.dumps({"warps": config.num_warps, "stages": config.num_stages, "blocks": config.kwargs})


def timings_of(each: DeltaNetShape, segments: int, rep: int) -> Timings:
    """Times all configurations."""
    from triton.testing import do_bench

    tuners = autotuners()
    for tuner in tuners.values():
        tuner.cache.clear()
        tuner.cache_results = False
        tuner._do_bench = lambda call, quantiles: do_bench(call, warmup=5, rep=rep, quantiles=quantiles)
        tuner.__dict__.pop("do_bench", None)
        tuner.configs_timings = {}
    each.run("cuda", segments)
    return {
        name: {named(config): timing[0] for config, timing in tuner.configs_timings.items()}
        for name, tuner in tuners.items()
        if tuner.configs_timings
    }


def choose(found: list[Timings]) -> dict[str, str]:
    """The configuration of each kernel with the lowest worst ratio to the fastest."""
    chosen = {}
    for kernel in found[0]:
        ratios = {
            config: max(each[kernel].get(config, float("inf")) / min(each[kernel].values()) for each in found)
            for config in found[0][kernel]
        }
        chosen[kernel] = min(ratios, key=ratios.__getitem__)
    return chosen


def of_the_table(kernel: str, times: dict[str, float]) -> float:
    """The time with the fastest candidate of model/kernels/configurations.py."""
    candidates = [
        json.dumps({"warps": each.warps, "stages": each.stages, "blocks": dict(each.blocks)})
        for each in CANDIDATES.get(kernel, ())
    ]
    return min((times[each] for each in candidates if each in times), default=float("nan"))


def report(results: dict[str, Any]) -> str:
    shapes, chosen = results["shapes"], results["chosen"]
    lines = [
        f"# Kernel configurations, {results['date']}",
        "",
        f"On one {results['gpu']}; milliseconds of a kernel, {results['segments']} samples per pack. *Fastest*: of all "
        "configurations; *one*: the configuration that is best for all head counts; *table*: the fastest candidate of "
        "model/kernels/configurations.py.",
        "",
        "| kernel | one | " + " | ".join(f"{name}: fastest, one, table, slowest" for name in shapes) + " |",
        "|---" * (len(shapes) + 2) + "|",
    ]
    for kernel, config in chosen.items():
        cells = []
        for each in shapes.values():
            times = each[kernel]
            cells.append(
                f"{min(times.values()):.3f}, {times.get(config, float('nan')):.3f}, {of_the_table(kernel, times):.3f}, "
                f"{max(t for t in times.values() if t < float('inf')):.3f}"
            )
        lines.append(f"| {kernel} | `{config}` | " + " | ".join(cells) + " |")
    lines.append("")
    for name, each in shapes.items():
        best = sum(min(times.values()) for times in each.values())
        one = sum(times.get(chosen[kernel], float("nan")) for kernel, times in each.items()) / best
        table = sum(of_the_table(kernel, times) for kernel, times in each.items()) / best
        lines.append(
            f"- {name}: all kernels once {best:.3f} ms at best; {one:.3f} of it with one, {table:.3f} with the table"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", nargs="+", default=["16:16", "16:32", "16:48", "8:8"], help="key:value heads")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--segments", type=int, default=16)
    parser.add_argument("--rep", type=int, default=20, help="milliseconds for which each configuration is timed")
    parser.add_argument("--limit", type=float, default=100, help="seconds after which no number of heads is begun")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    begun = time.perf_counter()
    watchdog = threading.Timer(options.limit + 20, os._exit, [124])
    watchdog.daemon = True
    watchdog.start()
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / f"kernel-choice-{datetime.date.today().isoformat()}"
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        shapes = {name: shape(*map(int, name.split(":")), options.tokens) for name in options.heads}
        compile_all(list(shapes.values()), 0.6 * options.limit)
        print(f"compiled after {time.perf_counter() - begun:.0f} s", flush=True)
        import torch

        found: dict[str, Timings] = {}
        longest = 0.0
        for name, each in shapes.items():
            start = time.perf_counter()
            if start - begun + longest > options.limit:
                print(f"{name}: no time left")
                continue
            found[name] = timings_of(each, options.segments, options.rep)
            longest = max(longest, time.perf_counter() - start)
            print(f"{name} timed after {time.perf_counter() - begun:.0f} s", flush=True)
            results = {
                "date": datetime.date.today().isoformat(),
                "gpu": torch.cuda.get_device_name(),
                "tokens": options.tokens,
                "segments": options.segments,
                "chosen": choose(list(found.values())),
                "shapes": found,
            }
            stem.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
            stem.with_suffix(".md").write_text(report(results))
            print(stem.with_suffix(".md").read_text(), flush=True)


if __name__ == "__main__":
    main()
