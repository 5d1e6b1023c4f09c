"""Vision and language on GPUs of their own against other layouts of the same GPUs: speed, memory, and who waits.

    torchrun --nproc-per-node 2 --master-addr 127.0.0.1 benchmarks/vision_gpus.py --receipts R --texts T

Runs the bundled trainer itself (`vlmdata.model.training.loop.train`), one case after another in the same processes,
which spares their start; nothing is saved. Each case makes one step to warm up, then counts some, then one with torch's
profiler. That step gives `busy`, the share of its time in which the GPU ran any kernel other than a message (a message
that waits for its other end is a running kernel too), and `queued`, the median time from a kernel's launch to its
start: microseconds if the GPU waits for the host, more if the host is ahead. Waits of the two sides are those of the
trainer's log, as shares of the counted steps. `device_allocations` and `retries` are the allocator's in counted steps.
Writes vision-gpus-<date>.json and .md under --out after each case.

Without CUDA it runs small presets, as a check of the script.

A case is `PRESET:KIND`, where KIND is receipts or texts. `:frozen` after it freezes the tower, and `:N` packs N tokens
instead of --capacity.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import faulthandler
import gc
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vlmdata.model.parallel.environment import before_megatron

before_megatron()

import numpy as np
import torch
import torch.distributed as dist

from vlmdata.model.parallel import groups
from vlmdata.model.parallel.cpu_mode import cpu_mode_if_needed
from vlmdata.model.parallel.separation import forget_separation
from vlmdata.model.training import loop
from vlmdata.model.training.build import device_of_this_process
from vlmdata.model.training.checkpoints.checkpoint import Checkpoints
from vlmdata.model.training.kernels import compile_ahead
from vlmdata.model.training.reports.profiling import Profiler
from vlmdata.model.training.settings.config_loading import load_config

#: Settings of each layout; all other processes are data parallel.
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "vision + language": {"vision_gpus": 1},
    "vision + language, 3 ahead": {"vision_gpus": 1, "vision_ahead": 3},
    "tensor + sequence": {"tp": 2, "sp": True},
}
KINDS = ("receipts", "texts")
#: Of torch's allocator: blocks taken from the driver, and times it ran out and gave all of them back.
ALLOCATOR = {"device_allocations": "num_device_alloc", "retries": "num_alloc_retries"}


COMPILED: set[tuple[str, int, int | None]] = set()


class Case(NamedTuple):
    """A model, its data, whether its tower is frozen, and tokens per pack if they are not those of the options."""

    preset: str
    kind: str
    frozen: bool
    capacity: int | None

    @classmethod
    def of(cls, text: str) -> Case:
        """Reads ``PRESET:KIND[:frozen][:N]``."""
        preset, kind, *rest = text.split(":")
        frozen = rest[:1] == ["frozen"]
        capacity = [int(each) for each in rest[frozen:]]
        if kind not in KINDS or len(capacity) > 1:
            raise ValueError(text)
        return cls(preset, kind, frozen, *capacity or [None])

    def __str__(self) -> str:
        packs = f", packs of {self.capacity:,}" if self.capacity else ""
        return f"{self.preset}, {self.kind}" + ", frozen tower" * self.frozen + packs


class Busy(Profiler):
    """In place of the run's profiler: what this GPU does in a step, and what the allocator does in those before.

    Args:
        steps: The step to profile, twice.
        path: Ignored: no trace is written, which would take longer than the step.
        device: The device.
    """

    last: ClassVar[dict[str, float]] = {}
    allocations: ClassVar[list[dict[str, int]]] = []

    def __init__(self, steps: tuple[int, ...], path: Path, device: torch.device):
        super().__init__(steps, path, device)

    @contextlib.contextmanager
    def at(self, step: int) -> Iterator[None]:
        """Wraps a step."""
        if self._device.type != "cuda":
            yield
            return
        if not self.covers(step):
            before = torch.cuda.memory_stats(self._device)
            yield
            after = torch.cuda.memory_stats(self._device)
            grown = {name: after[key] - before[key] for name, key in ALLOCATOR.items()}
            Busy.allocations.append(grown)
            return
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            begun = time.perf_counter()
            yield
            torch.cuda.synchronize()
            seconds = time.perf_counter() - begun
        events = profile.profiler.kineto_results.events()
        Busy.last = shares_of(events, seconds) | {"queued_ms": queued(events)}


def shares_of(events: Sequence[Any], seconds: float) -> dict[str, float]:
    """The shares of a step's time in which kernels ran: of computation, and of messages while nothing else ran."""
    spans: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
    for each in events:
        if each.device_type() == torch.autograd.DeviceType.CUDA and not each.is_user_annotation():
            spans["nccl" in each.name().lower()].append((each.start_ns(), each.end_ns()))
    computing, all_kernels = covered(spans[False]), covered(spans[False] + spans[True])
    return {"busy": computing / 1e9 / seconds, "messages": (all_kernels - computing) / 1e9 / seconds}


def queued(events: Sequence[Any]) -> float:
    """The median time in milliseconds from the launch of a kernel to its start, without messages; NaN if unknown."""
    launched = {each.correlation_id(): each.end_ns() for each in events if "LaunchKernel" in each.name()}
    times = [
        each.start_ns() - launched[each.correlation_id()]
        for each in events
        if each.device_type() == torch.autograd.DeviceType.CUDA
        and "nccl" not in each.name().lower()
        and each.correlation_id() in launched
    ]
    return float(np.median(times)) / 1e6 if times else float("nan")


def covered(spans: list[tuple[int, int]]) -> float:
    """The length of the union of intervals."""
    if not spans:
        return 0.0
    begins, ends = np.array(sorted(spans)).T
    latest = np.maximum.accumulate(ends)
    begins[1:] = np.maximum(begins[1:], latest[:-1])
    return float(np.maximum(ends - begins, 0).sum())


def measure(case: Case, data: list[str], layout: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Trains in a layout, and what the log says of the counted steps."""
    out = options.work / "run"
    if dist.get_rank() == 0:
        shutil.rmtree(out, ignore_errors=True)
    forget_separation()
    regroup({name: size for name, size in layout.items() if name in ("tp", "vision_gpus")})
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    Busy.last, Busy.allocations = {}, []
    last = 1 + options.steps + 1
    settings = {
        "data.paths": data,
        "data.capacity": case.capacity or options.capacity,
        "data.global_batch": options.global_batch,
        "data.pad_multiple": 16,
        "data.workers": options.workers,
        "model.preset": case.preset,
        "model.freeze": ["vision", "merger"] if case.frozen else [],
        "optimizer.warmup_steps": 1,
        "run.steps": last,
        "run.out": str(out),
        "run.tensorboard": False,
        "run.profile": [last, last],
        **{f"parallel.{name}": value for name, value in layout.items()},
    }
    config = load_config(None, list(settings.items()))
    known = (case.preset, layout.get("tp", 1), case.capacity)  # of which an earlier case has compiled the kernels
    ahead = None if known in COMPILED else compile_ahead(config)
    COMPILED.add(known)
    with ahead or contextlib.nullcontext() as kernels:
        loop.train(config, device_of_this_process(), False, kernels)
    own: dict[str, Any] = {**Busy.last, "memory_gib": peak_gib()}
    own |= {name: sum(each[name] for each in Busy.allocations[1:]) for name in ALLOCATOR}
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
        f"{device_name()}, torch {torch.__version__}, bf16; {options.global_batch} packs of "
        f"{options.capacity} tokens a step in every layout, steps counted after one: {options.steps}; MTP on. Memory "
        "and `busy` by rank: with separate sides rank 0 is the tower. `busy`: share of a profiled step in which a "
        "kernel other than a message ran; `queued`: the median time from a kernel's launch to its start. Waits: of the "
        "tower for gradients, of the language model for rows, as shares "
        "of the step.",
        "",
        "| model, data | layout | real tokens/s per GPU | of data parallel | memory, GiB | busy | queued, ms | waits: "
        "vision, language | seconds of each step | MFU |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows.values():
        base = rows.get(f"{row['case']}, data", {}).get("tokens_per_second_per_gpu")
        start = f"| {row['case']} | {row['layout']} |"
        speed = row["tokens_per_second_per_gpu"]
        relative = "" if base is None else f"{speed / base:.2f}"
        waits = f"{row['vision_wait']:.0%}, {row['language_wait']:.0%}" if row["vision_wait"] else ""
        memory = ", ".join(f"{each['memory_gib']:.1f}" for each in row["gpus"])
        busy = ", ".join(f"{each.get('busy', 0.0):.0%}" for each in row["gpus"])
        latency = ", ".join(f"{each.get('queued_ms', float('nan')):.2f}" for each in row["gpus"])
        counted = ", ".join(f"{each:.2f}" for each in row["step_seconds"][1:-1])
        lines.append(
            f"{start} {speed:,.0f} | {relative} | {memory} | {busy} | {latency} | {waits} | {counted} | "
            f"{row['mfu']:.1%} |"
        )
    return "\n".join([*lines, ""])


def peak_gib() -> float:
    """This GPU's peak memory."""
    return float(torch.cuda.max_memory_allocated() / 2**30) if torch.cuda.is_available() else float("nan")


def device_name() -> str:
    """The kind of device."""
    return str(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else "CPU"


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
    cases = [Case.of(f"{preset}:{kind}") for preset in ("2b", "0.8b") for kind in KINDS]
    parser.add_argument("--cases", nargs="+", type=Case.of, default=cases, metavar="PRESET:KIND[:frozen][:N]")
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--capacity", type=int, default=8192)
    parser.add_argument("--global-batch", type=int, default=24)
    parser.add_argument("--steps", type=int, default=2, help="steps counted")
    parser.add_argument("--workers", type=int, default=4, help="processes of each rank's loader")
    parser.add_argument("--limit", type=float, default=230.0, help="seconds after which no case begins")
    parser.add_argument("--work", type=Path, default=Path("/tmp/vision-gpus"))
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.limit + 60, exit=True)
    begun = time.monotonic()
    loop.Profiler = Busy  # type: ignore[misc]
    Checkpoints.save = lambda *_: None  # type: ignore[method-assign]  # of random weights, 30 GB
    groups.initialize()
    device = device_of_this_process()
    kinds = {
        "receipts": [options.receipts] * 16 if options.receipts else [],
        "texts": [options.texts, *[options.receipts] * 4] if options.texts and options.receipts else [],
    }
    with cpu_mode_if_needed():
        measure_all(options, kinds, device, begun)
    # The groups of earlier cases are gone without notice; leaving them in order would wait for nothing.
    sys.stdout.flush()
    os._exit(0)


def measure_all(options: argparse.Namespace, kinds: dict[str, list[str]], device: torch.device, begun: float) -> None:
    """Measures the cases that begin before the limit."""
    rows: dict[str, dict[str, Any]] = {}
    for case, name in itertools.product(options.cases, options.layouts):
        if not (data := kinds[case.kind]):
            continue
        late = torch.tensor(time.monotonic() - begun > options.limit, device=device).float()
        dist.all_reduce(late)
        if late:
            break
        about = {"case": str(case), "preset": case.preset, "data": case.kind, "layout": name}
        started = time.monotonic()
        found = measure(case, data, LAYOUTS[name], options)
        rows[f"{case}, {name}"] = about | found | {"case_seconds": time.monotonic() - started}
        write(rows, options)
        if dist.get_rank() == 0:
            print(json.dumps(rows[f"{case}, {name}"]), flush=True)
    if dist.get_rank() == 0:
        print(report(rows, options), flush=True)


if __name__ == "__main__":
    main()
