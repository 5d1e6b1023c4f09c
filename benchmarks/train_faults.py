"""What happens to a job of several GPUs: uneven and empty vision shares for 200 steps, and a rank that is killed.

    python benchmarks/train_faults.py --data CHATS --work WORK --gpus 4

CHATS should mix samples without images, with one and with several, so that under context parallelism 4 shares are
uneven and often empty. Three jobs of the bundled trainer, started with torchrun as a user would:

1. `whole`: 200 steps with one context-parallel group of all GPUs, undisturbed: it must end, and no rank may wait for
   another for ever.
2. `killed`: the same with a checkpoint every ten steps; one rank is killed (SIGKILL) after step 25; the time until
   torchrun has ended and what it says are noted.
3. the same command with --resume: it must go on from step 20 with the very samples of `whole`, and with its losses
   (bf16 kernels add in another order each time, so they agree to rounding only).

Writes train-faults-<GPUs>-gpus-<date>.md under --out after each of them. ``--parts`` makes some of them only, of which
the last needs what the first two left under --work.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

ROOT = Path(__file__).resolve().parents[1]


def command(options: argparse.Namespace, out: str, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(options.gpus)),
        *("--master-addr", "127.0.0.1", "--master-port", "29541", str(ROOT / "train.py")),
        *("--data", str(options.data), "--preset", "proxy", "--cp", str(options.gpus), "--capacity", "1024"),
        *("--global-batch", "2", "--workers", "1", "--steps", str(options.steps), "--out", out),
        *("--set", "run.tensorboard=false", "--set", "optimizer.warmup_steps=5", *more),
    ]


def lines_of(out: Path) -> list[dict[str, Any]]:
    """Steps by the log; of one made twice, the later."""
    file = out / "metrics.jsonl"
    written = file.read_text().splitlines() if file.exists() else []
    lines = [json.loads(line) for line in written if line.endswith("}")]
    by_step = {line["step"]: line for line in lines if "event" not in line}
    return [by_step[step] for step in sorted(by_step)]


def started(arguments: list[str], log: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(arguments, stdout=log.open("w"), stderr=subprocess.STDOUT, text=True, cwd=ROOT)


def completed(options: argparse.Namespace, name: str, *arguments: str) -> float:
    """Runs a job to its end; seconds."""
    log = options.work / f"{name}.log"
    begun = time.monotonic()
    code = started(command(options, *arguments), log).wait()
    assert code == 0, log.read_text()[-3000:]
    return time.monotonic() - begun


def kill_a_rank(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Starts the job, kills a rank after a step, and waits for its end."""
    log = options.work / "killed.log"
    job = started(command(options, str(out), "--set", "run.save_every=10", "--set", "run.keep=0"), log)
    while job.poll() is None and len(lines_of(out)) < options.kill_after:
        time.sleep(0.1)
    assert job.poll() is None, f"ended by itself: {log.read_text()[-2000:]}"
    ranks = [each for each in psutil.Process(job.pid).children() if "train.py" in " ".join(each.cmdline())]
    victim = next(each for each in ranks if each.environ().get("RANK") == str(options.gpus - 1))
    begun = time.monotonic()
    os.kill(victim.pid, signal.SIGKILL)
    code = job.wait(timeout=options.limit)
    seconds = time.monotonic() - begun
    left = [each.pid for each in ranks if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    cause = log.read_text().partition("Root Cause")[2]
    said = [" ".join(line.split()) for line in cause.splitlines() if line.strip().startswith(("rank", "traceback"))]
    return {"seconds": seconds, "code": code, "left": left, "said": " / ".join(said), "steps": len(lines_of(out))}


def resumed(options: argparse.Namespace, whole: Path, killed: Path) -> dict[str, Any]:
    """Goes on after the kill, and compares all steps with the undisturbed run's."""
    completed(options, "resumed", str(killed), "--resume")
    events = [json.loads(line) for line in (killed / "metrics.jsonl").read_text().splitlines()]
    ours, theirs = lines_of(killed), lines_of(whole)
    assert [line["samples"] for line in ours] == [line["samples"] for line in theirs]
    off = [abs(a["loss"] / b["loss"] - 1) for a, b in zip(ours, theirs, strict=True)]
    from_step = next(line["step"] for line in events if line.get("event") == "resumed")
    return {"from": from_step, "largest": max(off), "mean": float(np.mean(off))}


def report(found: dict[str, Any], options: argparse.Namespace) -> str:
    lines = [
        f"# Uneven vision shares and a killed rank, {datetime.date.today().isoformat()}",
        "",
        f"`python benchmarks/train_faults.py --gpus {options.gpus} --steps {options.steps} "
        f"--kill-after {options.kill_after}` on "
        f"{options.gpus} x {torch.cuda.get_device_name(0)}: proxy preset, context parallel {options.gpus}, two packs "
        "of 1,024 tokens a step.",
        "",
    ]
    if "whole" in found:
        whole, images = found["whole"], np.array(found["whole"]["images"])
        lines.append(
            f"- {len(images)} steps ended by themselves after {whole['seconds']:.0f} s (start-up included); images "
            f"a step: {images.min()} to {images.max()}, fewer than ranks in {np.mean(images < 2 * options.gpus):.0%} "
            "of the steps."
        )
    if "killed" in found:
        death = found["killed"]
        lines.append(
            f"- Rank {options.gpus - 1} killed after step {options.kill_after}: torchrun ended {death['seconds']:.1f} "
            f"s later with exit code {death['code']}, processes left: {len(death['left'])}. Root cause, by its report: "
            f"`{death['said']}`"
        )
    if "resumed" in found:
        again = found["resumed"]
        lines.append(
            f"- `--resume` went on from step {again['from']}; the samples of all steps are those of the undisturbed "
            f"run; losses differ by {again['mean']:.1e} in the mean and {again['largest']:.1e} at most (kernels may "
            "add in another order each time)."
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kill-after", type=int, default=25)
    parser.add_argument("--parts", nargs="+", choices=["whole", "killed", "resumed"], help="default: all")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds in which the job must have ended")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    options = parser.parse_args()
    # Told to stop, the jobs are ended first: ranks that live on would spoil whatever runs next on their GPUs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options.work.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    whole, killed = options.work / "whole", options.work / "killed"
    notes = options.work / "found.json"
    found: dict[str, Any] = json.loads(notes.read_text()) if options.parts and notes.exists() else {}
    for name in set(options.parts or ("whole", "killed")) & {"whole", "killed"}:
        shutil.rmtree(options.work / name, ignore_errors=True)  # of an earlier time, which would be refused
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "whole": lambda: {
            "seconds": completed(options, "whole", str(whole)),
            "images": [line["images"] for line in lines_of(whole)],
        },
        "killed": lambda: kill_a_rank(options, killed),
        "resumed": lambda: resumed(options, whole, killed),
    }
    try:
        for name in options.parts or parts:
            found[name] = parts[name]()
            print(f"{name}: {found[name]}", flush=True)
            notes.write_text(json.dumps(found))
            result = f"train-faults-{options.gpus}-gpus-{datetime.date.today().isoformat()}.md"
            (options.out / result).write_text(report(found, options))
    finally:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


if __name__ == "__main__":
    main()
