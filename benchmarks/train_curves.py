"""Loss curves of packed, context-parallel, padded and FP8 training on the same samples in the same steps.

    torchrun --nproc-per-node 1 --master-addr 127.0.0.1 benchmarks/train_curves.py --data DIR --way packed --out WORK
    torchrun --nproc-per-node 1 --master-addr 127.0.0.1 benchmarks/train_curves.py --data DIR --way again --out WORK
    torchrun --nproc-per-node 1 --master-addr 127.0.0.1 benchmarks/train_curves.py --data DIR --way padded --out WORK
    torchrun --nproc-per-node 2 --master-addr 127.0.0.1 benchmarks/train_curves.py --data DIR --way context --out WORK
    torchrun --nproc-per-node 1 --master-addr 127.0.0.1 benchmarks/train_curves.py --data DIR --way fp8 --out WORK
    python benchmarks/train_curves.py --compare --out WORK    (draws with matplotlib, of the extra `dev`)

Each way starts from the same random weights (same seed) and takes the loader's packs; "padded" spreads the samples of
every pack out to rectangles, each sample padded to the longest of the dataset; "context" splits every sample over the
ranks; "fp8" computes the matrix products of the language model in FP8. So a step's samples, targets and loss divisor
are the same, and only rounding may differ. To tell rounding from error, "again" repeats "packed" on another machine
run: bf16 kernels that add in another order each time part the curves by themselves.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vlmdata.model.families.qwen3_5.spec import step_flops
from vlmdata.model.parallel.environment import before_megatron

before_megatron()

import numpy as np
import torch

from vlmdata import PackedBatch, StreamingLoader, open_dataset
from vlmdata.batch import IGNORE_INDEX
from vlmdata.model.parallel import groups
from vlmdata.model.training.build import architecture_of, build, device_of_this_process
from vlmdata.model.training.data import RankPlace
from vlmdata.model.training.optimizer.learner import build_learner
from vlmdata.model.training.settings.config import TrainConfig
from vlmdata.model.training.settings.config_loading import load_config
from vlmdata.model.training.step import Stepper

WAYS = ("packed", "again", "padded", "context", "fp8")


def padded(batch: PackedBatch, longest: int) -> PackedBatch:
    """The samples of a pack, each padded to one length: the usual rectangle, as segments of equal length."""
    bounds, starts = batch.host.cu_seqlens, batch.host.cu_seqlens_padded[:-1]
    lengths = np.diff(bounds)
    rows = len(lengths)
    # Where the true tokens stand in the pack and in the rectangle.
    source = np.concatenate([start + np.arange(n) for start, n in zip(starts, lengths, strict=True)])
    target = np.concatenate([row * longest + np.arange(n) for row, n in enumerate(lengths)])
    old, new = torch.from_numpy(source), torch.from_numpy(target)

    def spread(x: torch.Tensor, fill: int | bool) -> torch.Tensor:
        out = torch.full((*x.shape[:-1], rows * longest), fill, dtype=x.dtype)
        out[..., new] = x[..., old]
        return out

    place = np.full(int(starts[-1] + lengths[-1]), -1)
    place[source] = target
    image_starts = torch.from_numpy(place[batch.host.image_starts])
    return dataclasses.replace(
        batch,
        input_ids=spread(batch.input_ids, 0),
        labels=spread(batch.labels, IGNORE_INDEX),
        loss_mask=spread(batch.loss_mask, 0),
        loss_weights=spread(batch.loss_weights, 0),
        position_ids=spread(batch.position_ids, 0),
        padding_mask=spread(batch.padding_mask, True),
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        cu_seqlens_padded=torch.arange(rows + 1, dtype=torch.int32) * longest,
        max_seqlen=longest,
        total_tokens=rows * longest,
        image_starts=image_starts,
        host=None,  # type: ignore[arg-type]
    )


def train(way: str, config: TrainConfig, steps: int, device: torch.device) -> list[dict[str, float]]:
    """Loss and gradient norm of every step."""
    place = RankPlace.here()
    architecture = architecture_of(config)
    model = build(config, architecture, place, device)
    learner = build_learner(model, config, device, torch.bfloat16)
    flops = step_flops(architecture, mtp=False)
    stepper = Stepper(learner, place, config.data.global_batch, config.data.capacity, flops, device)
    longest = -(-int(open_dataset(config.data.paths[0]).index.lengths.max()) // 16) * 16
    size = config.parallel.cp
    loader = StreamingLoader(
        config.data.paths,
        capacity=config.data.capacity,
        global_batch=config.data.global_batch,
        pad_multiple=16,
        pad_to_capacity=way != "padded",
        context_parallel=size,
        context_parallel_rank=place.cp_rank if size > 1 else None,
        num_workers=2,
        device=None if way == "padded" else device,
    )

    def batches() -> Any:
        while True:
            for batch in loader:
                yield padded(batch.clone(), longest).to(device) if way == "padded" else batch

    found, stream = [], batches()
    launched = stepper.launch(stream)
    for step in range(1, steps + 1):
        following = stepper.launch(stream) if step < steps else launched  # as in train.py
        result = stepper.finish(launched)
        launched = following
        found.append(
            {
                "step": step,
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "targets": result.targets,
                "tokens": result.tokens,
                "seconds": result.seconds,
                "memory": result.memory,
            }
        )
        if place.rank == 0:
            print(f"{way} step {step}: loss {result.loss:.5f} grad {result.grad_norm:.3f}", flush=True)
    loader.close()
    return found


def five_steps(curve: dict[str, Any]) -> np.ndarray:
    """Mean losses of every five steps in a row, where single steps are noise."""
    return np.convolve([each["loss"] for each in curve["steps"]], np.full(5, 0.2), mode="valid")


def end_of(losses: np.ndarray) -> float:
    """Mean of the last quarter, where noise of single steps is gone."""
    return float(losses[-(len(losses) // 4) :].mean())


def speed(curve: dict[str, Any]) -> float:
    """True tokens per second of the second half of the steps."""
    half = curve["steps"][len(curve["steps"]) // 2 :]
    return float(np.mean([each["tokens"] for each in half]) / np.median([each["seconds"] for each in half]))


def report(work: Path, results: Path, label: str) -> str:
    """Compares the ways that are there."""
    curves = {way: json.loads((work / f"{way}.json").read_text()) for way in WAYS if (work / f"{way}.json").exists()}
    reference = curves["packed"]["steps"]
    stem = results / "-".join(filter(None, ["train-curves", label, datetime.date.today().isoformat()]))
    lines = [
        f"# Loss curves, {datetime.date.today().isoformat()}",
        "",
        f"{len(reference)} steps of preset {curves['packed']['preset']} from random weights on real receipts, "
        f"{curves['packed']['gpu']}, bf16; `benchmarks/train_curves.py`, one command a way. "
        "Relative difference from `packed` (one GPU): largest and mean over the steps; and of the means of the first "
        "five steps, of any five in a row (largest), of the last five, and of the last quarter of all steps. "
        "Tokens/s are those of the second half of the steps; memory is the peak of PyTorch's tensors.",
        "",
        "| way | GPUs | first loss | last loss | largest | mean | first five | any five | last five | last quarter "
        "| true tokens/s | GiB |",
        "|---" * 12 + "|",
    ]
    for way, curve in curves.items():
        losses = np.array([each["loss"] for each in curve["steps"]])
        wanted = np.array([each["loss"] for each in reference])
        assert [each["targets"] for each in curve["steps"]] == [each["targets"] for each in reference], way
        off = np.abs(losses / wanted - 1)
        five = np.abs(five_steps(curve) / five_steps(curves["packed"]) - 1)
        lines.append(
            f"| {way} | {curve['gpus']} | {losses[0]:.4f} | {losses[-1]:.4f} | {off.max():.1e} | {off.mean():.1e} | "
            f"{five[0]:.1e} | {five.max():.1e} | {five[-1]:.1e} | {end_of(losses) / end_of(wanted) - 1:+.1e} | "
            f"{speed(curve):,.0f} | {curve['steps'][-1]['memory'] / 2**30:.1f} |"
        )
    text = "\n".join([*lines, "", f"![Loss of every way, and its difference from packed]({stem.name}.png)", ""])
    results.mkdir(parents=True, exist_ok=True)
    draw(curves, stem.with_suffix(".png"))  # first: the one that may lack its library
    stem.with_suffix(".json").write_text(json.dumps(curves) + "\n")
    stem.with_suffix(".md").write_text(text)
    return text


def draw(curves: dict[str, dict[str, Any]], path: Path) -> None:
    """The curves, and how far each is from `packed`, where the repeated run is the measure."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 2))
    for way, curve in curves.items():
        steps = [each["step"] for each in curve["steps"]]
        above.plot(steps, [each["loss"] for each in curve["steps"]], label=f"{way}, {curve['gpus']} GPU", linewidth=1.2)
        off = 100 * (five_steps(curve) / five_steps(curves["packed"]) - 1)
        below.plot(steps[4:], off, linewidth=2.4 if way == "again" else 1.2)
    above.set(ylabel="loss", yscale="log")
    above.legend(title="way")
    below.set(xlabel="step", ylabel="% from packed\n(means of 5 steps)")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--compare", action="store_true", help="compare what the ways wrote")
    parser.add_argument("--label", default="", help="of the result files")
    parser.add_argument("--preset", default="0.8b")
    parser.add_argument("--recompute", default="none", help="none, selective, full")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--capacity", type=int, default=8192)
    parser.add_argument("--global-batch", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--out", type=Path, required=True, help="where the ways' curves lie")
    parser.add_argument("--results", type=Path, default=Path(__file__).resolve().parent / "results")
    options = parser.parse_args()
    if options.compare:
        print(report(options.out, options.results, options.label))
        return
    faulthandler.dump_traceback_later(600, exit=True)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    groups.initialize(context=world)
    config = load_config(
        None,
        [
            ("data.paths", [str(options.data)]),
            ("data.capacity", options.capacity),
            ("data.global_batch", options.global_batch),
            ("model.preset", options.preset),
            ("model.mtp", False),
            ("model.recompute", options.recompute),
            ("model.vision_recompute", options.recompute == "full"),
            ("run.fp8", options.way == "fp8"),
            ("parallel.cp", world),
            ("optimizer.lr", options.lr),
            ("optimizer.warmup_steps", 5),
            ("run.steps", options.steps),
        ],
    )
    groups.seed_all(config.run.seed)
    steps = train(options.way, config, options.steps, device_of_this_process())
    if torch.distributed.get_rank() == 0:
        options.out.mkdir(parents=True, exist_ok=True)
        about = {"gpus": world, "gpu": torch.cuda.get_device_name(0), "preset": options.preset, "steps": steps}
        (options.out / f"{options.way}.json").write_text(json.dumps(about) + "\n")
    groups.destroy()


if __name__ == "__main__":
    main()
