"""Vision and language on GPUs of their own against other layouts of the same GPUs: speed, memory, and who waits.

    torchrun --nproc-per-node 2 --master-addr 127.0.0.1 benchmarks/vision_gpus.py --receipts R --texts T

Runs the bundled trainer itself (`model.training.loop.train`), one case after another in the same processes, which
spares their start; nothing is saved. Each case makes one step to warm up, then counts some, then one with torch's
profiler, from which `busy` comes: the share of that step's time in which the GPU ran any kernel other than a message.
(A message that waits for its other end is a running kernel too.) Waits of the two sides are those of the trainer's log,
as shares of the counted steps. Writes vision-gpus-<date>.json and .md under --out after each case.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import faulthandler
import gc
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model.parallel.environment import before_megatron

before_megatron()

import numpy as np
import torch
import torch.distributed as dist

from model.parallel import groups
from model.parallel.separation import forget_separation
from model.training import loop
from model.training.build import device_of_this_process
from model.training.checkpoint import Checkpoints
from model.training.config_loading import load_config
from model.training.kernels import compile_ahead

#: Settings of each layout; all other processes are data parallel.
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "vision + language": {"vision_gpus": 1},
    "vision + language, 3 ahead": {"vision_gpus": 1, "vision_ahead": 3},
    "tensor + sequence": {"tp": 2, "sp": True},
}
#: What a model of this size needs to fit beside its optimizer.
RECOMPUTED = {"4b": {"model.recompute": "full", "model.vision_recompute": True}}


class Busy:
    """In place of the run's profiler: in which shares of a step this GPU computes, and sends or waits in a message.

    Args:
        steps: The step, twice.
        path: Ignored: no trace is written, which would take longer than the step.
        device: The device.
    """

    last: ClassVar[dict[str, float]] = {}

    def __init__(self, steps: tuple[int, ...], path: Path, device: torch.device):
        self._step, self._device = steps[0], device

    @contextlib.contextmanager
    def at(self, step: int) -> Iterator[None]:
        """Wraps a step."""
        if step != self._step or self._device.type != "cuda":
            yield
            return
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            begun = time.perf_counter()
            yield
            torch.cuda.synchronize()
            seconds = time.perf_counter() - begun
        Busy.last = shares_of(profile, seconds)

    def close(self) -> None:
        """Nothing is open."""


def shares_of(profile: Any, seconds: float) -> dict[str, float]:
    """The shares of a step's time in which kernels ran: of computation, and of messages while nothing else ran."""
    spans: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
    for each in profile.profiler.kineto_results.events():
        if each.device_type() == torch.autograd.DeviceType.CUDA and not each.is_user_annotation():
            spans["nccl" in each.name().lower()].append((each.start_ns(), each.end_ns()))
    computing, all_kernels = covered(spans[False]), covered(spans[False] + spans[True])
    return {"busy": computing / 1e9 / seconds, "messages": (all_kernels - computing) / 1e9 / seconds}


def covered(spans: list[tuple[int, int]]) -> float:
    """The length of the union of intervals."""
    if not spans:
        return 0.0
    begins, ends = np.array(sorted(spans)).T
    latest = np.maximum.accumulate(ends)
    begins[1:] = np.maximum(begins[1:], latest[:-1])
    return float(np.maximum(ends - begins, 0).sum())


def measure(preset: str, data: list[str], layout: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Trains in a layout, and what the log says of the counted steps."""
    out = options.work / "run"
    if dist.get_rank() == 0:
        shutil.rmtree(out, ignore_errors=True)
    forget_separation()
    regroup({name: size for name, size in layout.items() if name in ("tp", "vision_gpus")})
    torch.cuda.reset_peak_memory_stats()
    last = 1 + options.steps + 1
    settings = {
        "data.paths": data,
        "data.capacity": options.capacity,
        "data.global_batch": options.global_batch,
        "data.pad_multiple": 16,
        "data.workers": 4,
        "model.preset": preset,
        "optimizer.warmup_steps": 1,
        "run.steps": last,
        "run.out": str(out),
        "run.tensorboard": False,
        "run.profile": [last, last],
        **RECOMPUTED.get(preset, {}),
        **{f"parallel.{name}": value for name, value in layout.items()},
    }
    config = load_config(None, list(settings.items()))
    with compile_ahead(config) or contextlib.nullcontext() as kernels:
        loop.train(config, device_of_this_process(), False, kernels)
    own = {**Busy.last, "memory_gib": torch.cuda.max_memory_allocated() / 2**30}
    each: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(each, own)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    counted = lines[1 : 1 + options.steps]
    seconds = sum(line["seconds"] for line in counted)
    waits = {name: sum(line.get(name, 0.0) for line in counted) / seconds for name in ("vision_wait", "language_wait")}
    return {
        "tokens_per_second_per_gpu": sum(line["tokens"] for line in counted) / seconds / dist.get_world_size(),
        "step_seconds": [line["seconds"] for line in lines],
        "mfu": float(np.mean([line.get("mfu", 0.0) for line in counted])),
        "data_wait": sum(line["data_wait"] for line in counted) / seconds,
        "losses": [line["loss"] for line in lines],
        "image_tokens": sum(line["patches"] / 4 for line in counted) / sum(line["tokens"] for line in counted),
        **waits,
        "gpus": each,
    }


def regroup(sizes: dict[str, Any]) -> None:
    """Leaves the groups of the case before, and makes those of the next."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    gc.collect()
    torch.cuda.empty_cache()
    groups.initialize(tensor=sizes.get("tp", 1), vision=sizes.get("vision_gpus", 0))


def report(rows: dict[str, dict[str, Any]], options: argparse.Namespace) -> str:
    """The results as Markdown."""
    lines = [
        f"# Vision and language on GPUs of their own, {datetime.date.today().isoformat()}",
        "",
        f"`torchrun --nproc-per-node {dist.get_world_size()} benchmarks/vision_gpus.py` on {dist.get_world_size()} x "
        f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, bf16; {options.global_batch} packs of "
        f"{options.capacity} tokens a step in every layout, {options.steps} steps counted after one; MTP on. Memory "
        "and `busy` by rank: with separate sides rank 0 is the tower. `busy`: share of a profiled step in which a "
        "kernel other than a message ran. Waits: of the tower for gradients, of the language model for rows, as shares "
        "of the step.",
        "",
        "| model | data | layout | real tokens/s per GPU | of data parallel | memory, GiB | busy | waits: vision, "
        "language | seconds a step | MFU |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows.values():
        base = rows.get(f"{row['preset']}, {row['data']}, data", {}).get("tokens_per_second_per_gpu")
        start = f"| {row['preset']} | {row['data']} | {row['layout']} |"
        if "failed" in row:
            lines.append(f"{start} failed: {row['failed']} | | | | | | |")
            continue
        speed = row["tokens_per_second_per_gpu"]
        relative = "" if base is None else f"{speed / base:.2f}"
        waits = f"{row['vision_wait']:.0%}, {row['language_wait']:.0%}" if row["vision_wait"] else ""
        memory = ", ".join(f"{each['memory_gib']:.1f}" for each in row["gpus"])
        busy = ", ".join(f"{each.get('busy', 0.0):.0%}" for each in row["gpus"])
        counted = row["step_seconds"][1:-1]
        lines.append(
            f"{start} {speed:,.0f} | {relative} | {memory} | {busy} | {waits} | {np.mean(counted):.2f} | "
            f"{row['mfu']:.1%} |"
        )
    return "\n".join([*lines, ""])


def write(rows: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    """Writes both files on rank 0."""
    if dist.get_rank():
        return
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / f"vision-gpus-{datetime.date.today().isoformat()}"
    stem.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    stem.with_suffix(".md").write_text(report(rows, options))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--receipts", help="dataset of receipts; read 16 times")
    parser.add_argument("--texts", help="dataset of texts (train_data.py texts), blended with the receipts four times")
    parser.add_argument("--presets", nargs="+", default=["2b", "0.8b"])
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--capacity", type=int, default=8192)
    parser.add_argument("--global-batch", type=int, default=24)
    parser.add_argument("--steps", type=int, default=2, help="steps counted")
    parser.add_argument("--limit", type=float, default=230.0, help="seconds after which no case begins")
    parser.add_argument("--work", type=Path, default=Path("/tmp/vision-gpus"))
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.limit + 60, exit=True)
    begun = time.monotonic()
    loop.Profiler = Busy  # type: ignore[assignment, misc]
    Checkpoints.save = lambda *_: None  # type: ignore[method-assign]  # of random weights, 30 GB
    groups.initialize()
    device = device_of_this_process()
    kinds = {
        "receipts": [options.receipts] * 16 if options.receipts else [],
        "texts": [options.texts, *[options.receipts] * 4] if options.texts and options.receipts else [],
    }
    rows: dict[str, dict[str, Any]] = {}
    for preset in options.presets:
        for kind, data in kinds.items():
            for name in options.layouts if data else ():
                late = torch.tensor(time.monotonic() - begun > options.limit, device=device).float()
                dist.all_reduce(late)
                if late:
                    break
                about = {"preset": preset, "data": kind, "layout": name}
                started = time.monotonic()
                found = measure(preset, data, LAYOUTS[name], options)
                rows[f"{preset}, {kind}, {name}"] = about | found | {"case_seconds": time.monotonic() - started}
                write(rows, options)
                if dist.get_rank() == 0:
                    print(json.dumps(rows[f"{preset}, {kind}, {name}"]), flush=True)
    if dist.get_rank() == 0:
        print(report(rows, options), flush=True)
    # The groups of earlier cases are gone without notice; leaving them in order would wait for nothing.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
