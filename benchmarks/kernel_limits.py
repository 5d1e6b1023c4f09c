"""Time of each kernel of a training step beside its own limit: bytes over memory bandwidth, FLOP over the peak.

    python benchmarks/kernel_limits.py --data R --preset 2b --capacity 16384
    python benchmarks/kernel_limits.py --report results/kernel-limits-DATE.json    # the tables again, without a GPU

One GPU, one pack a step, steps that run ahead as in train.py. Times are from the profiler, over --profiled steps. The
work is noted in one more step, call by call, where kernels are launched: Triton's, Transformer Engine's C++ functions,
FlashAttention 4 in the tower, and torch's own. A call's limit is the longer of two times:

- bytes: each tensor that it reads or writes, once (twice if it changes in place), over the data sheet's bandwidth. What
  it does not need, such as other columns of a shared tensor, counts too: a ratio can be too good by that;
- FLOP of matrix products and attention over the data sheet's dense bf16 peak. Attention: 4 d n^2 per head and segment
  forward (half if causal), 2.5 times that backward. The arithmetic of all other kernels is not counted.

So nothing reaches 1: a plain large matrix product reaches about 0.8 of an H200's peak, a plain copy about 0.9 of its
bandwidth. Writes kernel-limits-<date>.json and .md under --out; presets measured earlier that day stay in. Without CUDA
it runs on the CPU, as a check of the script (--preset tiny).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import re
import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vlmdata.model.parallel.environment import before_megatron, let_memory_grow

if __name__ == "__main__":
    let_memory_grow()  # before torch is imported

import torch

from benchmarks.kernel_work import Call, Recorder, group, watch_flash, watch_launches
from vlmdata import StreamingLoader

#: Bytes per second of memory, by a substring of the device name (data sheets).
BANDWIDTHS = {"H200": 4.8e12, "H100": 3.35e12}
#: Kernels with a smaller share of the time are told together.
SMALLEST = 0.002


class Limits(NamedTuple):
    """FLOP/s and bytes/s of a device."""

    flops: float
    bytes: float

    def milliseconds(self, call: Call) -> float:
        return 1e3 * max(call.bytes / self.bytes, call.flops / self.flops)


def row_of(kernel: str, widths: dict[str, int]) -> str:
    """The group of a kernel of a profile. Widths of heads in cuDNN's names tell the tower from the decoder.

    Of kernels without a width, those that add up gradients over a group's query heads are the decoder's: the tower has
    no groups.
    """
    if re.search(r"sdpa|compute_dot_do_o|cudnn::fusion|cudnn_generated", kernel):
        found = re.search(r"_\d+x\d+x(\d+)_|, (\d+)>", kernel)
        if found is None:
            return "attention of the decoder" if "reduce_head" in kernel else "attention of either"
        width = int(next(filter(None, found.groups())))
        near = min(widths, key=lambda part: (abs(widths[part] - width), part))
        return f"attention of the {near}"
    return group(kernel)


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Time, calls and limit of each group of kernels, the longest first."""
    limits = Limits(*found["limits"])
    table: dict[str, dict[str, Any]] = defaultdict(
        lambda: {"calls": 0.0, "ms": 0.0, "limit": 0.0, "bytes": 0.0, "flops": 0.0}
    )
    for name, (calls, spent) in found["kernels"].items():
        row = table[row_of(name, found["widths"])]
        row["calls"] += calls
        row["ms"] += spent
    for name, moved, flops, calls in found["work"]:
        row, call = table[group(name)], Call(name, moved, flops)
        row["limit"] += calls * limits.milliseconds(call)
        row["bytes"] += calls * moved
        row["flops"] += calls * flops
    made = [{"name": name, **row} for name, row in table.items() if row["ms"]]
    return sorted(made, key=lambda row: -row["ms"])


def singles(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The same for each kernel that has the name under which its work was noted: Triton's."""
    limits, made = Limits(*found["limits"]), []
    for name, (calls, spent) in found["kernels"].items():
        these = [(Call(name, moved, flops), n) for noted, moved, flops, n in found["work"] if noted == name]
        if these and not name.startswith("aten::"):
            limit = sum(n * limits.milliseconds(call) for call, n in these)
            noted = sum(n for _, n in these)
            made.append({"name": f"`{name}`", "calls": calls, "noted": noted, "ms": spent, "limit": limit})
    return sorted(made, key=lambda row: -row["ms"])


def table(found: dict[str, Any], made: list[dict[str, Any]], title: str) -> list[str]:
    """Markdown lines. Rows under :data:`SMALLEST` of the time are added up."""
    total = sum(spent for _, spent in found["kernels"].values())
    small = [row for row in made if row["ms"] < SMALLEST * total]
    shown = [row for row in made if row["ms"] >= SMALLEST * total]
    if small:
        sums = {key: sum(row[key] for row in small) for key in ("calls", "ms", "limit")}
        shown.append({"name": f"{len(small)} shorter ones", **sums})
    lines = [
        f"| {title} | launches | ms | share | limit, ms | bound by | limit / time | ms over the limit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in shown:
        share, over = row["ms"] / total, row["ms"] - row["limit"]
        by = "–" if not row.get("bytes") else "FLOP" if row.get("flops") else "bytes"
        told = (
            f"{row['limit']:.2f} | {by} | {row['limit'] / row['ms']:.2f} | {over:.1f}"
            if row["limit"]
            else "– | – | – | –"
        )
        lines.append(f"| {row['name']} | {row['calls']:.0f} | {row['ms']:.2f} | {share:.1%} | {told} |")
    return lines


def report(results: dict[str, Any]) -> str:
    lines = [f"# Kernels of a step beside their limits, {results['date']}", ""]
    lines += [f"- `{command}`" for command in results["commands"]]
    lines += ["", "How limits are counted: `benchmarks/kernel_limits.py`."]
    for preset, found in results["presets"].items():
        made = rows(found)
        total, limit = (sum(row[key] for row in made) for key in ("ms", "limit"))
        lines += [
            "",
            f"## {preset}",
            "",
            f"{found['about']}. A step takes {found['seconds'] * 1e3:.1f} ms (MFU {found['mfu']:.3f}); "
            f"its kernels take {total:.1f} ms under the profiler, their limits {limit:.1f} ms ({limit / total:.2f}).",
            "",
            *table(found, made, "kernels"),
            "",
            *table(found, singles(found), "Triton kernel"),
        ]
    return "\n".join([*lines, ""])


def kernel_times(work: Callable[[], Any], steps: int) -> dict[str, tuple[float, float]]:
    """Launches and milliseconds of each kernel, per step of the work."""
    activity = torch.profiler.ProfilerActivity
    on_gpu = torch.cuda.is_available()
    with torch.profiler.profile(activities=[activity.CUDA if on_gpu else activity.CPU]) as profile:
        work()
        if on_gpu:
            torch.cuda.synchronize()
    calls, spent = Counter[str](), Counter[str]()
    assert profile.profiler is not None
    for each in profile.profiler.kineto_results.events():
        if not on_gpu or ("CUDA" in str(each.device_type()) and not each.is_user_annotation()):
            calls[each.name()] += 1
            spent[each.name()] += each.end_ns() - each.start_ns()
    return {name: (calls[name] / steps, spent[name] / steps / 1e6) for name in calls}


def run(stepper: Any, pack: Any, number: int) -> list[Any]:
    """Makes steps, each launched before the one before it is finished, and returns their results."""
    stream, launched, found = itertools.repeat(pack), None, []
    for _ in range(number):
        following = stepper.launch(stream)
        if launched is not None:
            found.append(stepper.finish(launched))
        launched = following
    return [*found, stepper.finish(launched)]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Steps of a preset: their time, their kernels, and the work of their launches."""
    from vlmdata.model.training.kernels import compile_ahead, needs_compiler
    from vlmdata.model.training.settings.config_loading import load_config

    settings: list[Any] = [("data.paths", [options.data]), ("data.capacity", options.capacity)]
    settings += [("data.global_batch", 1), ("model.preset", options.preset), ("model.mtp", False)]
    config = load_config(None, [*settings, ("optimizer.warmup_steps", 1), *options.set])
    with compile_ahead(config) or contextlib.nullcontext() as kernels:
        before_megatron(compiled=needs_compiler(config))
        from vlmdata.model.parallel import groups
        from vlmdata.model.parallel.cpu_mode import cpu_mode_if_needed

        with cpu_mode_if_needed():
            groups.initialize()
            found = _measure(config, options, kernels)
            groups.destroy()
    return found


def _measure(config: Any, options: argparse.Namespace, kernels: Any) -> dict[str, Any]:
    from vlmdata.model.families import spec_of
    from vlmdata.model.flops import peak_flops
    from vlmdata.model.training.build import (
        architecture_of,
        build,
        computed_by,
        device_of_this_process,
        parameter_dtype,
    )
    from vlmdata.model.training.data import RankPlace
    from vlmdata.model.training.optimizer.learner import build_learner
    from vlmdata.model.training.processes.garbage import only_new_objects_collected
    from vlmdata.model.training.settings.model_settings import settings_of
    from vlmdata.model.training.step import Stepper

    device, recorder = device_of_this_process(), Recorder()
    architecture, place = architecture_of(config), RankPlace.here()
    watch_launches(recorder)  # before anything keeps one of the functions
    model = build(config, architecture, place, device)
    watch_flash(recorder, model)
    learner = build_learner(model, config, device, parameter_dtype(config, device))
    flops = spec_of(architecture).step_flops(architecture, False, ())
    stepper = Stepper(learner, place, 1, options.capacity, flops, device)
    with StreamingLoader(
        config.data.paths, capacity=options.capacity, global_batch=1, num_workers=0, pad_to_capacity=True
    ) as loader:
        packs = [each.clone() for each in itertools.islice(loader, 8)]
    pack = max(packs, key=lambda each: each.true_tokens).to(device)
    if kernels is not None:
        kernels.wait(print)
    with only_new_objects_collected():
        run(stepper, pack, options.warmup)
        steps = run(stepper, pack, options.steps)
        times = kernel_times(lambda: run(stepper, pack, options.profiled), options.profiled)
        recorder.takes(pack.host.cu_seqlens, pack.host.image_grid_thw.prod(axis=1))
        with recorder:
            run(stepper, pack, 1)
    seconds = median(each.seconds for each in steps)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    peak = peak_flops(device) or float("nan")
    told = computed_by(model, settings_of(config, architecture, device.type == "cuda"), device)
    return {
        "about": f"{told}; one pack of {options.capacity:,} tokens ({pack.true_tokens:,} of samples) and "
        f"{recorder.patches:,} patches; {' '.join(options.set) or 'nothing is recomputed'}",
        "seconds": seconds,
        "mfu": steps[-1].flops / seconds / peak,
        "limits": [peak, next((each for part, each in BANDWIDTHS.items() if part in name), float("nan"))],
        "widths": {"tower": architecture.vision.head_dim, "decoder": architecture.language.head_dim},
        "kernels": times,
        "work": [[*call, number] for call, number in recorder.calls.items()],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--preset", default="2b")
    parser.add_argument("--capacity", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--profiled", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    parser.add_argument("--report", type=Path, help="only write the tables of this .json")
    options = parser.parse_args()
    if options.report:
        options.report.with_suffix(".md").write_text(report(json.loads(options.report.read_text())))
        return
    today = datetime.date.today().isoformat()
    file = options.out / f"kernel-limits-{today}.json"
    earlier = json.loads(file.read_text()) if file.exists() else {"date": today, "commands": [], "presets": {}}
    earlier["commands"].append(shlex.join(["python", "benchmarks/kernel_limits.py", *sys.argv[1:]]))
    earlier["presets"][options.preset] = measure(options)
    options.out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(earlier, indent=1) + "\n")
    file.with_suffix(".md").write_text(report(earlier))
    print(file.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
