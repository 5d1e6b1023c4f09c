"""Fully sharded against data-parallel training on the same GPUs, in turn, in the same processes.

    torchrun --nproc-per-node 2 --master-addr 127.0.0.1 benchmarks/sharding_pairs.py --data R --preset 2b

Both ways train their own copy of the model on the same packs, which are on the GPU before the clock starts. In each
round each way makes some steps, launched ahead as in train.py; a pair is a round, so a host that other work slows
matters little. `host` is the time that launching a step takes: where it is as long as the step, the GPU waits for the
host. Prints a table. Without CUDA it runs on the CPU, as a check of the script.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vlmdata.model.parallel.environment import before_megatron

before_megatron(launch_order=False)

import torch
import torch.distributed as dist

from vlmdata import PackedBatch, StreamingLoader
from vlmdata.model.families import spec_of
from vlmdata.model.parallel import groups
from vlmdata.model.parallel.cpu_mode import cpu_mode_if_needed
from vlmdata.model.training.build import architecture_of, build, device_of_this_process, parameter_dtype
from vlmdata.model.training.data import RankPlace
from vlmdata.model.training.optimizer.learner import build_learner
from vlmdata.model.training.processes.garbage import only_new_objects_collected
from vlmdata.model.training.settings.config_loading import load_config
from vlmdata.model.training.step import Stepper, StepResult

WAYS: dict[str, dict[str, Any]] = {"data parallel": {}, "sharded": {"parallel.fsdp": True}}


class Timed(NamedTuple):
    """Of a step: its seconds, true tokens per second on all GPUs, and the host's seconds to launch it."""

    seconds: float
    tokens_per_second: float
    host: float


def packs_of(options: argparse.Namespace, device: torch.device) -> list[PackedBatch]:
    """The full packs of this rank."""
    with StreamingLoader(
        options.data,
        capacity=options.capacity,
        global_batch=dist.get_world_size(),
        num_workers=0,
        pad_to_capacity=True,
    ) as loader:
        return [batch.clone().to(device) for batch in itertools.islice(loader, options.packs)]


def stepper_of(options: argparse.Namespace, settings: dict[str, Any], device: torch.device) -> tuple[Any, Stepper]:
    """A model in training and its steps."""
    common = {
        "data.paths": [options.data],
        "data.capacity": options.capacity,
        "data.global_batch": dist.get_world_size(),
        "model.preset": options.preset,
        "model.recompute": options.recompute,
        "model.vision_recompute": options.recompute == "full",
        "optimizer.warmup_steps": 1,
    }
    config = load_config(None, list((common | settings).items()))
    architecture, place = architecture_of(config), RankPlace.here()
    learner = build_learner(build(config, architecture, place, device), config, device, parameter_dtype(config, device))
    flops = spec_of(architecture).step_flops(architecture, config.model.mtp, ())
    return learner, Stepper(learner, place, 1, options.capacity, flops, device)


def timed(stepper: Stepper, packs: list[PackedBatch]) -> Timed:
    """Makes a step on each pack, one launched before the one before it is finished."""
    given: Iterator[PackedBatch] = iter(packs)
    host, found, launched = 0.0, list[StepResult](), None
    for _ in packs:
        begun = time.perf_counter()
        following = stepper.launch(given)
        host += time.perf_counter() - begun
        if launched is not None:
            found.append(stepper.finish(launched))
        launched = following
    assert launched is not None
    found.append(stepper.finish(launched))
    seconds = sum(each.seconds for each in found)
    return Timed(seconds / len(packs), sum(each.tokens for each in found) / seconds, host / len(packs))


def rounds_of(ways: dict[str, Callable[[], Timed]], options: argparse.Namespace) -> dict[str, list[Timed]]:
    """Lets the ways take turns. The first rounds compile kernels and do not count."""
    found: dict[str, list[Timed]] = {name: [] for name in ways}
    with only_new_objects_collected():
        for number in range(options.warmup + options.rounds):
            for name, steps in ways.items():
                dist.barrier()
                result = steps()
                if number >= options.warmup:
                    found[name].append(result)
    return found


def report(found: dict[str, list[Timed]], options: argparse.Namespace) -> str:
    """The results as a table."""
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"
    base = next(iter(found.values()))
    lines = [
        f"{dist.get_world_size()} x {gpu}, torch {torch.__version__}; {options.preset}, one pack of {options.capacity} "
        f"tokens per GPU and step, recompute {options.recompute}; {options.packs} steps a round, {options.rounds} "
        "rounds; medians, and the least and largest ratio of a round",
        "",
        "| way | tokens/s | relative | seconds per step | host, seconds per step |",
        "|---|---|---|---|---|",
    ]
    for name, each in found.items():
        ratios = [a.tokens_per_second / b.tokens_per_second for a, b in zip(each, base, strict=True)]
        speed, seconds, host = (median(column) for column in zip(*((e[1], e[0], e[2]) for e in each), strict=True))
        spread = f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        lines.append(f"| {name} | {speed:,.0f} | {spread} | {seconds:.3f} | {host:.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--preset", default="2b")
    parser.add_argument("--capacity", type=int, default=8192)
    parser.add_argument("--recompute", default="full")
    parser.add_argument("--packs", type=int, default=4, help="steps a round")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2, help="rounds before")
    options = parser.parse_args()
    with cpu_mode_if_needed():
        groups.initialize()
        device = device_of_this_process()
        packs = packs_of(options, device)
        made = {name: stepper_of(options, settings, device) for name, settings in WAYS.items()}
        found = rounds_of({name: lambda s=s: timed(s, packs) for name, (_, s) in made.items()}, options)  # type: ignore[misc]
        if dist.get_rank() == 0:
            print(report(found, options), flush=True)
    os._exit(0)  # leaving the groups of two models in order takes longer


if __name__ == "__main__":
    main()
