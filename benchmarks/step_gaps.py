"""Where the GPU waits for the host in a training step: idle gaps, what launched before and after, host time by phase.

    python benchmarks/step_gaps.py --data R --preset 0.8b --capacity 16384

One pack a step, on one GPU. The packs are on the GPU before the clock starts; with --train they come from the loader's
workers, as in train.py. As there, a step is launched before the one before it is finished, and with --wait after it.
--set NAME=VALUE changes a setting of the trainer, such as optimizer.overlap=true. Prints the time of steps made back to
back, then a profile of two: gaps over --gap microseconds, kernels by number and by time, and calls to CUDA. Without
CUDA it runs on the CPU, as a check of the script (--preset tiny).
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vlmdata.model.parallel.environment import before_megatron

before_megatron()

import torch

from vlmdata import PackedBatch, StreamingLoader
from vlmdata.model.families import spec_of
from vlmdata.model.flops import peak_flops
from vlmdata.model.parallel import groups
from vlmdata.model.parallel.cpu_mode import cpu_mode_if_needed
from vlmdata.model.training.build import architecture_of, build
from vlmdata.model.training.data import RankPlace, endless, open_loader
from vlmdata.model.training.optimizer.learner import build_learner
from vlmdata.model.training.processes.garbage import only_new_objects_collected
from vlmdata.model.training.settings.config import TrainConfig
from vlmdata.model.training.settings.config_loading import load_config
from vlmdata.model.training.step import LaunchedStep, Stepper, StepResult

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
#: Bounds of the classes of gaps, in microseconds.
CLASSES = (0, 5, 20, 50, 100, 200, float("inf"))
#: Gaps of a step that are printed, the longest.
MOST = 60


class Span(NamedTuple):
    """What ran, in nanoseconds of the profiler's clock; of several that overlap, the first and the last."""

    begin: int
    end: int
    first: str
    last: str


class Steps:
    """Makes steps and notes the host's time in their phases.

    Args:
        config: The run.
        packs: Packs, without end.
        ahead: Whether each step is launched before the one before it is finished, as in train.py on GPUs.
    """

    def __init__(self, config: TrainConfig, packs: Iterator[PackedBatch], ahead: bool):
        self._ahead = ahead
        self._launched: LaunchedStep | None = None
        architecture, place = architecture_of(config), RankPlace.here()
        model = build(config, architecture, place, DEVICE)
        learner = build_learner(model, config, DEVICE, torch.bfloat16 if CUDA else torch.float32)
        flops = spec_of(architecture).step_flops(architecture, config.model.mtp, ())
        self._packs, self._stepper = packs, Stepper(learner, place, 1, config.data.capacity, flops, DEVICE)
        self._marks: list[tuple[str, float]] = []
        self.phases: dict[str, list[float]] = defaultdict(list)
        inner: Any = learner.model[0]
        while hasattr(inner, "module"):
            inner = inner.module
        inner.register_forward_pre_hook(lambda *_: self._mark("until the forward pass"))
        inner.register_forward_hook(lambda *_: self._mark("forward pass launched"))
        update: Callable[[torch.Tensor], Any] = learner.optimizer.step

        def marked(total: torch.Tensor) -> Any:
            self._mark("backward pass launched, gradients reduced")
            found = update(total)
            self._mark("optimizer launched")
            return found

        learner.optimizer.step = marked

    def _mark(self, name: str) -> None:
        self._marks.append((name, time.perf_counter()))

    def _launch(self) -> LaunchedStep:
        work = self._stepper.launch(self._packs)
        self._mark("results sent")
        return work

    def __call__(self) -> StepResult:
        self._marks = [("begin", time.perf_counter())]
        work = self._launched or self._launch()
        if self._ahead:
            self._launched = self._launch()
        result = self._stepper.finish(work)
        self._mark("results read")
        for (_, one), (name, two) in itertools.pairwise(self._marks):
            self.phases[name].append(two - one)
        return result


def joined(spans: list[Span]) -> list[Span]:
    """Joins spans that overlap, in order of time."""
    found: list[Span] = []
    for span in sorted(spans):
        if found and span.begin <= found[-1].end:
            if span.end > found[-1].end:
                found[-1] = found[-1]._replace(end=span.end, last=span.last)
        else:
            found.append(span)
    return found


def profiled(step: Steps, number: int) -> tuple[list[Span], list[Span], list[tuple[int, int]]]:
    """Returns what ran on the device, calls to CUDA, and the bounds of the steps."""
    activity = torch.profiler.ProfilerActivity
    bounds = []
    with torch.profiler.profile(activities=[activity.CUDA if CUDA else activity.CPU]) as profile:
        step()  # the profiler's own start
        for _ in range(number):
            begin = time.time_ns()
            step()
            bounds.append((begin, time.time_ns()))
        if CUDA:
            torch.cuda.synchronize()
    assert profile.profiler is not None
    on_device, calls = [], []
    for each in profile.profiler.kineto_results.events():
        device = "CUDA" in str(each.device_type()) if CUDA else each.name() in ("aten::mm", "aten::addmm", "aten::bmm")
        (on_device if device else calls).append(Span(each.start_ns(), each.end_ns(), each.name(), each.name()))
    return on_device, calls, bounds


def tell_gaps(on_device: list[Span], calls: list[Span], bounds: list[tuple[int, int]], least: float) -> None:
    """Prints the idle time of each step, and its gaps longer than ``least`` microseconds."""
    for number, (begin, end) in enumerate(bounds):
        busy = joined([each for each in on_device if begin <= each.begin < end])
        spent = sum(each.end - each.begin for each in busy)
        print(f"step {number}: {(end - begin) / 1e6:.1f} ms, idle {(end - begin - spent) / 1e6:.1f} ms")
        edges = [Span(begin, begin, "", "(begin)"), *busy, Span(end, end, "(end)", "")]
        gaps = [(one.end, two.begin, one.last, two.first) for one, two in itertools.pairwise(edges)]
        for low, high in itertools.pairwise(CLASSES):
            these = [until - since for since, until, _, _ in gaps if low * 1e3 <= until - since < high * 1e3]
            print(f"    gaps of {low} to {high} µs: {len(these)}, {sum(these) / 1e6:.2f} ms")
        longest = sorted(gaps, key=lambda gap: gap[0] - gap[1])[:MOST]
        for since, until, before, after in sorted(longest):
            if until - since > least * 1e3:
                at, length = (since - begin) / 1e6, (until - since) / 1e3
                print(f"    at {at:7.2f} ms {length:6.0f} µs  {before[:60]} -> {after[:60]}")
                during: Counter[str] = Counter()
                for call in calls:
                    during[call.first] += max(min(call.end, until) - max(call.begin, since), 0)
                for name, spent in during.most_common(3):
                    if spent > 5000:
                        print(f"        {name} {spent / 1e3:.0f} µs")


def tell_most(title: str, spans: list[Span], bounds: list[tuple[int, int]], rows: int) -> None:
    """Prints the most frequent and the longest of a step."""
    number, spent = Counter[str](), Counter[str]()
    for span in spans:
        if any(begin <= span.begin < end for begin, end in bounds):
            number[span.first] += 1
            spent[span.first] += span.end - span.begin
    steps = len(bounds)
    print(f"== {title}: {number.total() / steps:.0f} a step, {spent.total() / steps / 1e6:.1f} ms")
    for order in (number, spent):
        for name, _ in order.most_common(rows):
            print(f"{number[name] / steps:8.1f} {spent[name] / steps / 1e6:9.3f} ms  {name[:120]}")
        print()


def packs_of(config: TrainConfig, train: bool, opened: ExitStack) -> Iterator[PackedBatch]:
    """Full packs that are on the device, or those of the trainer's loader."""
    if train:
        loader = open_loader(config, RankPlace.here(), architecture_of(config), DEVICE)
        opened.callback(loader.close)
        return endless(loader)
    capacity = config.data.capacity
    with StreamingLoader(
        config.data.paths, capacity=capacity, global_batch=1, num_workers=0, pad_to_capacity=True
    ) as loader:
        packs = [batch.clone().to(DEVICE) for batch in itertools.islice(loader, 12)]
    return itertools.cycle([each for each in packs if each.true_tokens > 0.9 * capacity] or packs)


def run(options: argparse.Namespace, opened: ExitStack) -> None:
    """Times steps, then profiles some."""
    settings: list[Any] = [("data.paths", [options.data]), ("data.capacity", options.capacity)]
    settings += [("data.global_batch", 1), ("model.preset", options.preset), ("model.mtp", False)]
    settings += [("optimizer.warmup_steps", 1), *options.set]
    config = load_config(None, settings)
    step = Steps(config, packs_of(config, options.train, opened), not options.wait)
    with only_new_objects_collected():
        for _ in range(options.warmup):
            step()
        step.phases.clear()
        found = [step() for _ in range(options.steps)]
        seconds = median(each.seconds for each in found)
        print("steps, s: " + " ".join(f"{each.seconds:.4f}" for each in found))
        flops = sum(each.flops for each in found) / len(found)
        print(f"median {seconds:.4f} s, MFU {flops / seconds / (peak_flops(DEVICE) or float('nan')):.3f}")
        for name, times in step.phases.items():
            print(f"host, {name}: {median(times) * 1e3:.2f} ms")
        on_device, calls, bounds = profiled(step, 2)
    tell_gaps(on_device, calls, bounds, options.gap)
    tell_most("on the device", on_device, bounds, 40)
    tell_most("calls", calls, bounds, 15)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--preset", default="0.8b")
    parser.add_argument("--capacity", type=int, default=16384)
    parser.add_argument("--train", action="store_true", help="take packs from the loader's workers")
    parser.add_argument("--wait", action="store_true", help="finish each step before the next one is launched")
    parser.add_argument("--steps", type=int, default=8, help="steps counted")
    parser.add_argument("--warmup", type=int, default=4, help="steps before")
    parser.add_argument("--gap", type=float, default=200.0, help="microseconds from which a gap is printed")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args()
    with cpu_mode_if_needed(), ExitStack() as opened:
        groups.initialize()
        run(options, opened)
        opened.close()
        groups.destroy()


if __name__ == "__main__":
    main()
