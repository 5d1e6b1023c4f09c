"""Runs of train.py as users start them: speed, data wait and memory of presets, and what balancing of packs gains.

    python benchmarks/train_runs.py --data RECEIPTS --cases wait                       # one GPU
    python benchmarks/train_runs.py --data RECEIPTS --cases 4b 9b 9b-dp 27b            # up to four
    python benchmarks/train_runs.py --data RECEIPTS TEXTS --cases balanced unbalanced  # four; data of mixed kinds
    python benchmarks/train_runs.py --data DOCUMENTS --cases 65k 65k-cp                # up to two; train_data.py
    python benchmarks/train_runs.py --data RECEIPTS-JXL --cases 2b-wait --label jxl    # one; likewise grpc://HOST:PORT

Each case is one command line (it stands in the result). Steps after the warm-up are read from ``metrics.jsonl``; when
they are made the job is killed, so that no checkpoint of 100 GB is written. A case with a profile makes another step
or two for it, and the result has its kernels by family. A case that runs out of memory or time is a result, too.

``memory_gib`` is the peak of PyTorch's tensors on a GPU, ``device_gib`` what nvidia-smi saw in use there (also spare
blocks of the allocator, and NCCL), ``host_gib`` by how much the machine's memory grew. With CUDA_VISIBLE_DEVICES
several of these may run on one machine side by side. Writes train-runs-<date>.json and .md under --out, added to what
is there.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from kernel_families import kernel_sums, table

ROOT = Path(__file__).resolve().parents[1]


@dataclasses.dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        what: What it shows.
        gpus: Processes.
        options: Of train.py.
        steps: Steps in all.
        warmup: Steps that are not counted.
        profile: Steps that are profiled, after the counted ones.
    """

    what: str
    gpus: int
    options: str
    steps: int = 12
    warmup: int = 4
    profile: int = 0


_FULL = "--set model.recompute=full --set model.vision_recompute=true"
_FSDP = "--set parallel.fsdp=true"
CASES = {
    "wait": Case("share of waiting for data", 1, "--preset 0.8b --capacity 16384 --global-batch 4 --workers 4", 16),
    # With every codec of pixels, and from a service: --label says which.
    "2b-wait": Case("share of waiting for data", 1, "--preset 2b --capacity 16384 --global-batch 1 --workers 1", 20, 6),
    "fp8": Case(
        "2b in FP8", 1, "--preset 2b --capacity 16384 --global-batch 4 --set run.fp8=true --set model.mtp=false"
    ),
    "bf16": Case("2b in bf16, to compare", 1, "--preset 2b --capacity 16384 --global-batch 4 --set model.mtp=false"),
    "2b": Case("memory", 1, "--preset 2b --capacity 16384 --global-batch 1"),
    "0.8b-profile": Case(
        "profile", 1, "--preset 0.8b --capacity 16384 --global-batch 1 --set model.mtp=false", 10, 5, profile=2
    ),
    "2b-profile": Case(
        "profile", 1, "--preset 2b --capacity 16384 --global-batch 1 --set model.mtp=false", 10, 5, profile=2
    ),
    # What is tried first on one GPU: little arithmetic a step, so launches count.
    "0.8b-small": Case("small steps", 1, "--preset 0.8b --capacity 8192 --global-batch 1 --workers 4", 60, 30),
    # One pack of long documents (train_data.py documents).
    "65k": Case("long context", 1, f"--preset 2b --capacity 65536 --global-batch 1 {_FULL}", 6, 3, profile=1),
    "65k-cp": Case("long context", 2, f"--preset 2b --cp 2 --capacity 65536 --global-batch 1 {_FULL}", 6, 3, profile=1),
    "65k-cp-selective": Case(
        "long context",
        2,
        "--preset 2b --cp 2 --capacity 65536 --global-batch 1 --set model.recompute=selective "
        "--set model.vision_recompute=true",
        6,
        3,
    ),
    "4b": Case("memory", 1, f"--preset 4b --capacity 8192 --global-batch 1 {_FULL}", 6, 3),
    "4b-fp8": Case(
        "4b in FP8",
        1,
        "--preset 4b --capacity 8192 --global-batch 4 --set run.fp8=true --set model.mtp=false "
        "--set model.recompute=selective",
        9,
        4,
    ),
    "4b-bf16": Case(
        "4b in bf16, to compare",
        1,
        "--preset 4b --capacity 8192 --global-batch 4 --set model.mtp=false --set model.recompute=selective",
        9,
        4,
    ),
    "9b-dp": Case("memory", 2, f"--preset 9b --capacity 8192 --global-batch 2 {_FULL}", 6, 3),
    "2b-dp": Case("speed, memory", 2, f"--preset 2b --capacity 8192 --global-batch 2 {_FULL}", 10, 4, profile=1),
    # What a GPU does without another one.
    "2b-alone": Case("speed", 1, f"--preset 2b --capacity 8192 --global-batch 1 {_FULL}", 10, 4),
    "2b-fsdp": Case(
        "speed, memory", 2, f"--preset 2b --capacity 8192 --global-batch 2 {_FULL} {_FSDP}", 10, 4, profile=1
    ),
    "9b-fsdp": Case(
        "speed, memory", 2, f"--preset 9b --capacity 8192 --global-batch 2 {_FULL} {_FSDP}", 10, 4, profile=1
    ),
    "9b-fsdp-16k": Case("speed, memory", 2, f"--preset 9b --capacity 16384 --global-batch 2 {_FULL} {_FSDP}", 6, 3),
    "9b-fsdp-1": Case(
        "memory, profile",
        1,
        f"--preset 9b --capacity 8192 --global-batch 1 {_FULL} {_FSDP} --set optimizer.moments=bf16",
        6,
        3,
        profile=1,
    ),
    "27b-fsdp-2": Case(
        "memory",
        2,
        f"--preset 27b --capacity 8192 --global-batch 2 {_FULL} {_FSDP} --set optimizer.moments=bf16 "
        "--set optimizer.offload=true",
        5,
        2,
    ),
    "27b-fsdp": Case("memory", 4, f"--preset 27b --capacity 8192 --global-batch 4 {_FULL} {_FSDP}", 6, 3),
    "9b-tp": Case(
        "speed, profile",
        2,
        "--preset 9b --tp 2 --sp --capacity 8192 --global-batch 2 --set model.recompute=selective",
        8,
        3,
        profile=1,
    ),
    "9b-tp-spread": Case(
        "speed, profile",
        2,
        "--preset 9b --tp 2 --sp --set parallel.vision_tp=1 --capacity 8192 --global-batch 2 "
        "--set model.recompute=selective",
        8,
        3,
        profile=1,
    ),
    "9b-tp-16k": Case("speed", 2, f"--preset 9b --tp 2 --sp --capacity 16384 --global-batch 1 {_FULL}", 6, 3),
    "9b-tp-16k-spread": Case(
        "speed",
        2,
        f"--preset 9b --tp 2 --sp --set parallel.vision_tp=1 --capacity 16384 --global-batch 1 {_FULL}",
        6,
        3,
    ),
    "9b": Case(
        "speed, profile",
        4,
        "--preset 9b --tp 2 --sp --capacity 16384 --global-batch 4 --set model.recompute=selective",
        8,
        3,
        profile=1,
    ),
    "9b-spread": Case(
        "speed, profile",
        4,
        "--preset 9b --tp 2 --sp --set parallel.vision_tp=1 --capacity 16384 --global-batch 4 "
        "--set model.recompute=selective",
        8,
        3,
        profile=1,
    ),
    "9b-dp4": Case(
        "speed",
        4,
        "--preset 9b --capacity 8192 --global-batch 8 --set model.recompute=selective "
        "--set model.vision_recompute=true",
        8,
        3,
    ),
    "27b": Case("memory", 4, f"--preset 27b --tp 4 --sp --capacity 8192 --global-batch 1 {_FULL}", 6, 3),
    "27b-spread": Case(
        "memory",
        4,
        f"--preset 27b --tp 4 --sp --set parallel.vision_tp=1 --capacity 8192 --global-batch 1 {_FULL}",
        6,
        3,
    ),
    "balanced": Case("balance", 4, "--preset 0.8b --capacity 8192 --global-batch 8", 24, 6),
    "unbalanced": Case("balance", 4, "--preset 0.8b --capacity 8192 --global-batch 8 --set data.balance=false", 24, 6),
}


def run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Starts a case and reads its steps."""
    case, out = CASES[name], options.work / name
    case = dataclasses.replace(case, steps=options.steps or case.steps, warmup=options.warmup or case.warmup)
    settings = ["--set", "run.tensorboard=false", "--set", "optimizer.warmup_steps=2", "--set", "run.async_save=false"]
    given = [f"--data={path}" for path in options.data]
    arguments = [*case.options.split(), "--steps", str(case.steps + 1000), *settings, *given, "--out", str(out)]
    if "--workers" not in arguments:
        arguments += ["--workers", "2"]
    trace = out / "profile" / "rank-00000.json"
    if case.profile:
        arguments += ["--set", f"run.profile=[{case.steps + 1},{case.steps + case.profile}]"]

    def made() -> bool:
        traces = sorted(trace.parent.glob("*.txt"))  # a table is written after its trace
        return len(lines_of(out)) >= case.steps and (not case.profile or len(traces) == case.gpus)

    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(case.gpus)]
    launch += ["--master-addr", "127.0.0.1", "--master-port", str(options.port), str(ROOT / "train.py")]
    shutil.rmtree(out, ignore_errors=True)  # lines of an earlier try would count
    out.mkdir(parents=True)
    log = (out / "log").open("w")
    host = psutil.virtual_memory().used
    job = subprocess.Popen([*launch, *arguments], stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
    begun, first = time.monotonic(), None
    device_peak = host_peak = asked = 0.0
    try:
        while job.poll() is None and not made() and time.monotonic() - begun < options.limit:
            time.sleep(0.2)
            if time.monotonic() > asked + 2.0:
                device_peak, asked = max([device_peak, *device_memory()]), time.monotonic()
            host_peak = max(host_peak, (psutil.virtual_memory().used - host) / 2**30)
            if first is None and lines_of(out):
                first = time.monotonic() - begun
        seconds, code = time.monotonic() - begun, job.poll()
    finally:
        end(job)
    found = {"what": case.what, "gpus": case.gpus, "command": " ".join(["train.py", *case.options.split()])}
    found |= {"note": options.note, "first_step_after": first, "device_gib": device_peak, "host_gib": host_peak}
    lines = lines_of(out)
    if lines:
        found["memory_gib"] = max(line.get("memory_gib") or 0 for line in lines)
    if len(lines) <= case.warmup:
        how = f"stopped after {seconds:.0f} s" if code is None else f"ended with exit code {code} after {seconds:.0f} s"
        said = reason((out / "log").read_text())
        return found | {"failed": f"{how}, {len(lines)} steps done: {said}", "seconds": seconds}
    if trace.with_suffix(".txt").exists():
        found["profile"] = kernel_sums(trace, case.profile)
    counted = lines[case.warmup : case.steps]
    seconds = np.array([line["seconds"] for line in counted])
    return found | {
        "steps": len(counted),
        "tokens_per_second": sum(line["tokens"] for line in counted) / float(seconds.sum()),
        "mfu": float(np.average([line.get("mfu") or 0 for line in counted], weights=seconds)),
        "wait": sum(line["data_wait"] for line in counted) / float(seconds.sum()),
        "seconds": float(seconds.mean()),
        "seconds_p95": float(np.quantile(seconds, 0.95)),
        "fill": float(np.mean([line["fill"] for line in counted])),
    }


#: What a log says where memory ran out, on a GPU, in NCCL or on the host.
_NO_MEMORY = ("out of memory", "CUDA calloc", "CUDA malloc", "Cannot allocate memory", "exitcode: -9")


def reason(log: str) -> str:
    """Returns the line of a log that says why memory ran out, or the end of what the run itself printed."""
    for line in log.splitlines():
        if any(each in line for each in _NO_MEMORY):
            return line.strip()[:300]
    own, _, _ = log.partition("torch/distributed/elastic")  # torchrun's report names no reason
    return own.rsplit("\n", 1)[0][-500:] if own != log else log[-500:]


def device_memory() -> list[float]:
    """Returns the GiB in use on each visible GPU, over all processes; nothing without nvidia-smi."""
    with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):
        return [float(line) / 1024 for line in nvidia_smi("memory.used")]
    return []


def nvidia_smi(field: str) -> list[str]:
    """Asks nvidia-smi: a context of this process would take memory of the GPU from the case."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    command = [
        "nvidia-smi",
        f"--query-gpu={field}",
        "--format=csv,noheader,nounits",
        *([f"--id={shown}"] if shown else []),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.splitlines()


def end(job: subprocess.Popen[bytes]) -> None:
    """Kills it with all it started: torchrun gives each rank a session of its own, and loaders are their children."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [*psutil.Process(job.pid).children(recursive=True), psutil.Process(job.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    job.wait()


def lines_of(out: Path) -> list[dict[str, Any]]:
    file = out / "metrics.jsonl"
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]


def add(name: str, found: dict[str, Any], out: Path) -> None:
    """Puts a case into today's results; several processes may do so at once."""
    out.mkdir(parents=True, exist_ok=True)
    stem = out / f"train-runs-{datetime.date.today().isoformat()}"
    with (out / ".train-runs.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        file = stem.with_suffix(".json")
        rows = json.loads(file.read_text()) if file.exists() else {}
        rows[name] = found
        file.write_text(json.dumps(rows, indent=1) + "\n")
        stem.with_suffix(".md").write_text(report(rows))


def report(rows: dict[str, Any]) -> str:
    lines = [
        f"# Runs of train.py, {datetime.date.today().isoformat()}",
        "",
        f"{device_name()}, torch {torch.__version__}, bf16 unless a note says otherwise; "
        "`benchmarks/train_runs.py`. `wait`: the longest wait of any rank for data, as a share of the step. Memory: "
        "the peak of tensors on a GPU; all that is in use there; growth on the host.",
        "",
        "| case | GPUs | command | real tokens/s | MFU | memory | wait | seconds a step (95 %) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        start = f"| {name} | {row['gpus']} | `{row['command']}` |"
        if "failed" in row:
            said = " ".join(row["failed"].split()).replace("|", "/")
            lines.append(f"{start} failed: {said[:300]} | | {memory_of(row)} | | |")
            continue
        lines.append(
            f"{start} {row['tokens_per_second']:,.0f} | {row['mfu']:.1%} | {memory_of(row)} | "
            f"{row['wait']:.2%} | {row['seconds']:.2f} ({row['seconds_p95']:.2f}) |"
        )
    notes = [f"- {name}: {row['note']}" for name, row in rows.items() if row.get("note")]
    lines += ["", *notes] if notes else []
    profiles = {name: row["profile"] for name, row in rows.items() if "profile" in row}
    if profiles:
        lines += ["", "Kernels by family (`benchmarks/kernel_families.py`), rank 0:", "", *table(profiles)]
    return "\n".join([*lines, ""])


def memory_of(row: dict[str, Any]) -> str:
    """Formats the three figures; older results have the first one only."""
    figures = [row.get(name) for name in ("memory_gib", "device_gib", "host_gib")]
    return "; ".join(f"{each:.1f}" for each in figures if each) + " GiB" if any(figures) else ""


def device_name() -> str:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return next(iter(nvidia_smi("name")), "no GPU")
    return "no GPU"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), required=True)
    parser.add_argument("--work", type=Path, default=Path("/tmp/train-runs"))
    parser.add_argument("--port", type=int, default=29551)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which a case is given up")
    parser.add_argument("--steps", type=int, help="steps in all; default: the case's")
    parser.add_argument("--warmup", type=int, help="steps that are not counted; default: the case's")
    parser.add_argument("--label", default="", help="after the name of the case, such as the codec of the data")
    parser.add_argument("--note", default="", help="a sentence for the result, such as what else the machine did")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    options = parser.parse_args()
    # Told to stop, the job is ended first: ranks that live on would spoil whatever runs next on their GPUs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for name in options.cases:
        found = run(name, options)
        name = "-".join(filter(None, [name, options.label]))
        add(name, found, options.out)
        print(name, json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
