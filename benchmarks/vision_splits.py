"""The best number of GPUs for a vision tower of its own on 8 to 64 GPUs, simulated, for large models.

    python benchmarks/vision_splits.py        # some minutes, one core, no GPU

Simulates the passes of steps (`vlmdata.model.parallel.split_estimate`) with the FLOP of each model and with FLOP/s per
GPU that were measured (`SPEEDS`), for every layout in `LAYOUTS` whose sizes fit, and compares the fastest split with
the fastest layout that all GPUs share. Packs of 8,192 tokens. Tensor parallelism costs nothing here, memory and
messages are not simulated. Writes vision-splits-<date>.json and .md under --out.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
from pathlib import Path
from typing import Any

from packing import draw

from vlmdata.model.parallel.split_estimate import Speeds, SplitSimulation
from vlmdata.packing import PlanConfig, cost_model, plan_epoch
from vlmdata.packing.plan.epoch import EpochPlan

GPUS = (8, 16, 32, 64)
AHEAD = (1, 4)
#: Packs of a step, per GPU.
PACKS = (4, 16)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A layout of a language model.

    Attributes:
        tensor: Tensor-parallel size.
        stages: Pipeline stages.
        expert: Expert-parallel size.
    """

    tensor: int = 1
    stages: int = 1
    expert: int = 1

    def fits(self, gpus: int) -> bool:
        """Whether so many GPUs can hold this layout."""
        return gpus > 0 and gpus % (self.tensor * self.stages) == 0 and gpus // self.stages % self.expert == 0

    def __str__(self) -> str:
        sizes = {"TP": self.tensor, "PP": self.stages, "EP": self.expert}
        return " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "DP"


#: Layouts to try. For 27b and 397b-a17b those that 141 GB per GPU may hold with the distributed optimizer.
LAYOUTS = {
    "9b": [Layout(), Layout(tensor=2)],
    "27b": [Layout(tensor=4), Layout(tensor=2, stages=2), Layout(stages=4)],
    "397b-a17b": [
        Layout(stages=stages, expert=expert)
        for stages in (2, 3, 4, 5, 6, 10, 12, 15)
        for expert in (4, 8, 16, 32)
        if stages * expert >= 48
    ],
}
#: Layouts with pipeline stages, each compared with itself.
PIPELINES = {
    "9b": [Layout(stages=2), Layout(stages=4)],
    "27b": [Layout(stages=4), Layout(tensor=2, stages=4)],
    "397b-a17b": [Layout(stages=4, expert=4), Layout(stages=4, expert=8)],
}
#: MFU that was measured, by model: of the tower alone, of the language model, and of a tower in its layout. Tower:
#: trained against frozen steps of 2b on one GPU (train-speed-frozen-2026-11-21: 45 %). 9b: four GPUs with DP 2 x TP 2
#: (train-runs-2026-11-21: 36.6 %). 27b: TP 4 with full recomputation, a third more work than counts (21.8 %).
#: 397b-a17b: nothing is measured; equal speeds.
SPEEDS = {
    "9b": Speeds(vision=0.45, language=0.36, vision_together=0.36),
    "27b": Speeds(vision=0.45, language=0.22, vision_together=0.22),
    "397b-a17b": Speeds(),
}


def plan_of(model: str, data: str, batch: int) -> EpochPlan:
    """Some steps of drawn samples."""
    table = draw(data, max(12 * batch, 10_000))
    return plan_epoch(table, PlanConfig(8192, batch, cost=cost_model(model), pad_to_capacity=True, last="drop"), 0)


def best_of(model: str, data: str, gpus: int, packs: int, plans: dict[int, EpochPlan]) -> dict[str, Any]:
    """The fastest layout for both, and the fastest split for each lead of the tower: packs per unit of time."""
    speeds, found = SPEEDS[model], []
    together: list[tuple[float, str]] = []

    def batch_of(ranks: int) -> int:
        """The global batch nearest to so many packs per GPU that data-parallel ranks can share."""
        return max(1, round(packs * gpus / ranks)) * ranks

    def plan(batch: int) -> EpochPlan:
        if batch not in plans:
            plans[batch] = plan_of(model, data, batch)
        return plans[batch]

    for layout in LAYOUTS[model]:
        replica = layout.tensor * layout.stages
        if layout.fits(gpus):
            batch = batch_of(gpus // replica)
            time = SplitSimulation(plan(batch), layout.tensor, layout.stages, speeds).time_together(gpus)
            assert time is not None
            together.append((batch / time, str(layout)))
        for vision in range(1, max(gpus // 3, 4) + 1):
            if not layout.fits(gpus - vision):
                continue
            batch = batch_of((gpus - vision) // replica)
            for ahead in AHEAD:
                simulation = SplitSimulation(plan(batch), layout.tensor, layout.stages, speeds)
                split = simulation.split(gpus, vision, ahead, None)
                found.append((batch / split.time, vision, str(layout), ahead, split))
    row: dict[str, Any] = {"model": model, "data": data, "gpus": gpus, "packs": packs}
    if together:
        speed, name = max(together)
        row |= {"together": name, "together_speed": speed}
    for ahead in AHEAD:
        of_lead = [each for each in found if each[3] == ahead]
        if of_lead:
            speed, vision, name, _, split = max(of_lead, key=lambda each: each[0])
            row[f"ahead {ahead}"] = {
                "vision_gpus": vision,
                "layout": name,
                "vision_idle": split.vision_idle,
                "language_idle": split.language_idle,
                "gain": speed / row["together_speed"] if together else None,
            }
    return row


def same_pipeline(model: str, layout: Layout, gpus: int, packs: int) -> dict[str, Any]:
    """The fastest split for a layout of the language model, relative to the same layout of both, at equal FLOP/s."""
    replica, speeds = layout.tensor * layout.stages, Speeds()
    plans: dict[int, EpochPlan] = {}

    def plan(ranks: int) -> EpochPlan:
        batch = max(1, round(packs * gpus / ranks)) * ranks
        if batch not in plans:
            plans[batch] = plan_of(model, "receipts", batch)
        return plans[batch]

    whole = plan(gpus // replica)
    time = SplitSimulation(whole, layout.tensor, layout.stages, speeds).time_together(gpus)
    assert time is not None
    found = []
    for vision in range(1, gpus // 3):
        if layout.fits(gpus - vision):
            part = plan((gpus - vision) // replica)
            split = SplitSimulation(part, layout.tensor, layout.stages, speeds).split(gpus, vision, 1, None)
            found.append((part.config.global_batch / split.time / (whole.config.global_batch / time), vision))
    about = {"model": model, "layout": str(layout), "gpus": gpus, "packs": packs}
    if not found:
        return about
    gain, vision = max(found)
    return about | {"vision_gpus": vision, "gain": gain}


def report(rows: list[dict[str, Any]], pipelines: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    lines = [
        f"# Splits of GPUs between vision and language, simulated, {datetime.date.today().isoformat()}",
        "",
        "`python benchmarks/vision_splits.py`. Nothing here ran on GPUs: passes are simulated from FLOP and from "
        "measured FLOP/s per GPU (named in the script; equal for 397b-a17b, of which nothing is measured). *Packs*: of "
        "8,192 tokens, per GPU and step. *Together*: the fastest layout that all GPUs share, with the tower in its "
        "first stage. *Gain*: packs per second relative to it, with `vision_ahead` 1; *4 ahead* is that of the best "
        "split with 4. Tensor parallelism costs nothing here; memory and messages are not simulated.",
        "",
        "| model | data | GPUs | packs | together | vision GPUs | layout of the others | vision waits | "
        "language waits | gain | 4 ahead |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "together" not in row or "ahead 1" not in row:
            continue
        best, far = row["ahead 1"], row["ahead 4"]
        lines.append(
            f"| {row['model']} | {row['data']} | {row['gpus']} | {row['packs']} | {row['together']} | "
            f"{best['vision_gpus']} | {best['layout']} | {best['vision_idle']:.0%} | {best['language_idle']:.0%} | "
            f"{best['gain']:.2f} | {far['gain']:.2f} |"
        )
    lines += [
        "",
        "If the language model needs pipeline stages, the tower in the first stage makes it the slowest. The same "
        "layout for the language model in both ways, receipts, equal FLOP/s:",
        "",
        "| model | layout | GPUs | packs | vision GPUs | gain |",
        "|---|---|---|---|---|---|",
    ]
    for row in pipelines:
        found = f"{row['vision_gpus']} | {row['gain']:.2f}" if "gain" in row else "none up to a third fits |"
        lines.append(f"| {row['model']} | {row['layout']} | {row['gpus']} | {row['packs']} | {found} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument(
        "--data", nargs="+", choices=["receipts", "mixed", "long-tailed"], default=["receipts", "mixed"]
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    options = parser.parse_args()
    rows = []
    for model in options.models:
        for data in options.data:
            plans: dict[int, EpochPlan] = {}
            for gpus, packs in itertools.product(GPUS, PACKS):
                rows.append(best_of(model, data, gpus, packs, plans))
                print(json.dumps(rows[-1]), flush=True)
    pipelines = [
        same_pipeline(model, layout, gpus, packs)
        for model in options.models
        for layout in PIPELINES[model]
        for gpus, packs in itertools.product(GPUS[2:], PACKS)
        if layout.fits(gpus)
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / f"vision-splits-{datetime.date.today().isoformat()}"
    stem.with_suffix(".json").write_text(json.dumps({"splits": rows, "pipelines": pipelines}, indent=1) + "\n")
    stem.with_suffix(".md").write_text(report(rows, pipelines))


if __name__ == "__main__":
    main()
