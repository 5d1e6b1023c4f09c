"""Seconds from the start of train.py to the end of its first step on a GPU, with and without compiled kernels.

    python benchmarks/cold_start.py --data DIR

Ways, each a fresh process (`start_probe.py` runs train.py in it):

- bounded: empty caches of Triton, Inductor and FlashAttention 4; the configurations of model/kernels/configurations.py;
- cached: the same, with the caches that it left;
- all configurations: empty caches; Triton's autotuner tries all (`model.tune_kernels=true`), compiled in parallel;
- all, cached: the same, with the caches that it left;
- compiled: empty caches; torch compiles functions in place of Triton kernels (`model.compile=true`);
- compiled, cached: the same, with the caches that it left.

Steady seconds are the median of the last half of the steps, whose packs are the same in each way: what a bounded choice
costs afterwards. Writes cold-start-<label>-<date>.json and .md under --out.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
#: The settings of each way, and the name of its caches.
WAYS = {
    "bounded": ({}, "bounded"),
    "cached": ({}, "bounded"),
    "all configurations": ({"model.tune_kernels": "true"}, "all"),
    "all, cached": ({"model.tune_kernels": "true"}, "all"),
    "compiled": ({"model.compile": "true"}, "compiled"),
    "compiled, cached": ({"model.compile": "true"}, "compiled"),
}


def run(way: str, options: argparse.Namespace, caches: Path) -> dict[str, Any]:
    """Starts the trainer, and returns its report."""
    own, name = WAYS[way]
    folder = caches / name
    if "cached" not in way:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    report, out = folder / "report.json", folder / "run"
    report.unlink(missing_ok=True)
    shutil.rmtree(out, ignore_errors=True)
    settings = {"run.tensorboard": "false", "optimizer.warmup_steps": "1"} | own
    command = [sys.executable, "-W", "ignore", str(HERE / "start_probe.py"), str(report), str(options.steps), "--"]
    command += ["--data", str(options.data), "--preset", options.preset, "--capacity", str(options.capacity)]
    command += ["--global-batch", "1", "--steps", "1000", "--out", str(out)]
    command += [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(folder / "flash-attention"),
    }
    print(f"== {way}", flush=True)
    process = subprocess.Popen([*command, *options.more], env=environment, start_new_session=True)
    try:
        code = process.wait(options.limit)
    except subprocess.TimeoutExpired:
        code = "no end"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the loader's workers, too
    wait_for_memory()
    if not report.exists():
        print(f"   {way}: {code} after {options.limit} s at most", flush=True)
        return {}
    return json.loads(report.read_text())


def wait_for_memory(seconds: float = 30.0) -> None:
    """Waits until the driver has freed the memory of the process that ended, which the next one may need."""
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    query = ["nvidia-smi", f"--id={device}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    end = time.monotonic() + seconds
    while time.monotonic() < end and shutil.which(query[0]):
        used = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
        if used.isdigit() and int(used) < 2048:  # MiB
            return
        time.sleep(0.5)


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """The figures of a way."""
    steps = found["steps"]
    missed = [each for each in found["triton"] if not each["cached"]]
    return {
        "first step done": found["phases"][-1][1],
        "first step": steps[0],
        "second step": steps[1],
        "steady step": round(median(steps[len(steps) // 2 :]), 4),
        "compiled in the step": len(missed),
        "seconds in Triton's compiler": round(sum(each["seconds"] for each in missed), 1),
        "seconds in FlashAttention 4's compiler": round(sum(seconds for _, seconds in found["flash"]), 1),
        "seconds in the C compiler": round(sum(seconds for _, seconds in found["built"]), 1),
        "seconds in the autotuner": round(sum(found["tuned"].values()), 1),
        "seconds in torch's compiler": round(sum(seconds for _, seconds in found["dynamo"]), 1),
        "loss": found["loss"],
    }


def show(way: str, found: dict[str, Any], functions: int) -> None:
    """Prints where time went."""
    print(f"   {json.dumps(summary(found))}")
    print("   steps: " + " ".join(f"{each:.3f}" for each in found["steps"]))
    missed = [each for each in found["triton"] if not each["cached"]]
    print("   compiled: " + ", ".join(f"{each['kernel']} {each['seconds']:.1f} s" for each in missed))
    print(
        "   compiled by FlashAttention 4: " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in found["flash"])
    )
    print("   built: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in found["built"]))
    print("   tuned: " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in found["tuned"].items()))
    print("   torch: " + ", ".join(f"{name[:80]} {seconds:.1f} s" for name, seconds in found["dynamo"]))
    for phase, stacks in found["stacks"].items():
        if stacks["samples"] < 50:
            continue
        print(f"   on the stack, {phase}, of {stacks['samples']} samples:")
        inner = [(name, count) for name, count in stacks["functions"] if 10 < count < 0.97 * stacks["samples"]]
        most = [f"{name} {count}" for name, count in inner[:functions]]
        print("     " + ", ".join(most), flush=True)


def report(results: dict[str, Any]) -> str:
    """The results as a page."""
    ways = results["ways"]
    names = list(next(iter(ways.values()))["summary"])
    lines = [
        f"# Cold start, {results['date']}",
        "",
        f"- `{results['command']}`",
        "",
        f"On one {results['gpu']}, {results['cores']} CPU cores; {results['preset']}, one pack of "
        f"{results['capacity']:,} tokens a step. Seconds since the process started. {results['note']}",
        "",
        "| | " + " | ".join(ways) + " |",
        "|---" * (len(ways) + 1) + "|",
    ]
    for phase, _ in next(iter(ways.values()))["phases"]:
        at = [dict(way["phases"]).get(phase) for way in ways.values()]
        lines.append(f"| {phase} | " + " | ".join("" if each is None else f"{each:.1f}" for each in at) + " |")
    figures = [f"| {name} | " + " | ".join(f"{way['summary'][name]}" for way in ways.values()) + " |" for name in names]
    return "\n".join([*lines, *figures, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--preset", default="2b")
    parser.add_argument("--capacity", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)
    parser.add_argument("--limit", type=float, default=150, help="seconds after which a way is given up")
    parser.add_argument("--functions", type=int, default=45, help="of the stacks to print")
    parser.add_argument("--caches", type=Path, help="folder of the caches; default: a temporary one")
    parser.add_argument("--more", nargs="*", default=[], help="further options of train.py")
    parser.add_argument("--label", default="")
    parser.add_argument("--note", default="", help="a sentence for the result, such as what else the machine did")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    today = datetime.date.today().isoformat()
    stem = options.out / "-".join(filter(None, ["cold-start", options.label, today]))
    ways: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in options.ways:
            found = run(way, options, options.caches or Path(folder))
            if found:
                show(way, found, options.functions)
                del found["stacks"]
                ways[way] = found | {"summary": summary(found)}
                results = {
                    "date": today,
                    "command": shlex.join(["python", "benchmarks/cold_start.py", *sys.argv[1:]]),
                    "gpu": found["gpu"],
                    "cores": len(os.sched_getaffinity(0)),
                    "preset": options.preset,
                    "capacity": options.capacity,
                    "note": options.note,
                    "ways": ways,
                }
                options.out.mkdir(parents=True, exist_ok=True)
                stem.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
                stem.with_suffix(".md").write_text(report(results))
    print(stem.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
