"""Every parallel layout against one GPU: loss and gradient norm of the same steps from the same weights.

    python benchmarks/train_parity.py --prepare WORK --data DIR      # weights, and the reference, on one GPU
    torchrun --nproc-per-node 4 --master-addr 127.0.0.1 benchmarks/train_parity.py --work WORK --data DIR

Runs the bundled trainer itself (`vlmdata.model.training.loop.train`), a dense and an experts model with real head
widths, bf16, multi-token prediction on, 8 packs of real receipts a step. Weights are random, written as a Hugging Face
checkpoint and converted, so each layout loads and cuts the same file. Writes train-parity-<date>.md and .json under
--out.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import faulthandler
import gc
import json
import math
import os
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vlmdata.model.families import architecture_to_hf
from vlmdata.model.parallel.environment import before_megatron

before_megatron()

import torch
from megatron.core import parallel_state
from safetensors.torch import save_file

from vlmdata import open_dataset
from vlmdata.model.architecture import MoeArchitecture
from vlmdata.model.families.qwen3_5.architecture import Qwen35Architecture
from vlmdata.model.families.qwen3_5.names import parameter_maps
from vlmdata.model.families.qwen3_5.presets import PRESETS
from vlmdata.model.parallel import groups
from vlmdata.model.parallel.separation import forget_separation
from vlmdata.model.training.build import device_of_this_process
from vlmdata.model.training.loop import train
from vlmdata.model.training.settings.config_loading import load_config
from vlmdata.model.weight_names.table import hf_names
from vlmdata.model.weights.convert import to_megatron

STEPS = 4
#: What one GPU does by itself: how far steps part for no reason of the layout; from which weights.
CONTROLS = {
    "again": ("one GPU, the same again", "weights"),
    "nudged": ("one GPU, one weight's last bit changed", "nudged"),
}
#: Settings beyond those of every case; the case's processes are all there are, the rest is data parallel.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "data 2": ("dense", {}),
    "data 4": ("dense", {}),
    "context 2": ("dense", {"cp": 2}),
    "context 2, all-to-all": ("dense", {"cp": 2, "cp_comm": "a2a"}),
    "context 4": ("dense", {"cp": 4}),
    "tensor 2 + sequence": ("dense", {"tp": 2, "sp": True}),
    "tensor 2": ("dense", {"tp": 2}),
    "tensor 2 + sequence, images spread": ("dense", {"tp": 2, "sp": True, "vision_tp": 1}),
    "pipeline 2": ("dense", {"pp": 2}),
    "vision 1, language 1": ("dense", {"vision_gpus": 1}),
    "vision 1, language 1, experts": ("experts", {"vision_gpus": 1}),
    "vision 2, language 2 (tensor)": ("dense", {"vision_gpus": 2, "tp": 2, "sp": True}),
    "context 2 x tensor 2": ("dense", {"cp": 2, "tp": 2, "sp": True}),
    "data 4, experts": ("experts", {}),
    "experts 2": ("experts", {"ep": 2}),
    "experts 4": ("experts", {"ep": 4}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prepare", type=Path, help="make weights, the reference and its noise there")
    parser.add_argument("--work", type=Path, help="where --prepare made them")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cases", nargs="*", choices=list(CASES), help="default: all that this many processes can run")
    parser.add_argument("--kinds", nargs="*", choices=["dense", "experts"], default=["dense", "experts"])
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    options = parser.parse_args()
    if options.prepare is not None:
        prepare(options.prepare, options.data, options.kinds)
        return
    compare(options)


def prepare(work: Path, data: Path, kinds: list[str]) -> None:
    """Random weights of the models as distributed checkpoints, and one GPU's steps."""
    groups.initialize()
    for kind in kinds:
        architecture = model_of(kind, data)
        for weights, last_bit in (("weights", 0), ("nudged", 1)):
            write_weights(work / kind / "hf", architecture, last_bit)
            to_megatron(work / kind / "hf", work / kind / weights)
        for name, weights in (
            ("reference", "weights"),
            *((control, folder) for control, (_, folder) in CONTROLS.items()),
        ):
            found = steps_of(work, data, kind, {}, weights)
            (work / kind / f"{name}.json").write_text(json.dumps(found))
            print(kind, name, [f"{each['loss']:.5f}/{each['grad_norm']:.4f}" for each in found], flush=True)
    groups.destroy()


def model_of(kind: str, data: Path) -> Qwen35Architecture:
    proxy = PRESETS["proxy"].with_vocabulary(open_dataset(data).manifest.tokenizer)
    if kind == "dense":
        return proxy
    moe = MoeArchitecture(8, 2, 512, 512, 0.001)
    return dataclasses.replace(proxy, language=dataclasses.replace(proxy.language, intermediate_size=0, moe=moe))


def write_weights(folder: Path, architecture: Qwen35Architecture, last_bit: int) -> None:
    """Weights under which activations keep their size: a fresh model's gradients would drown in those of its norms.

    ``last_bit`` is added to the bits of one value of the last norm, the least change there is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in hf_names(parameter_maps(architecture)).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith(("linear_attn.norm.weight", "norm1.weight", "norm2.weight", "merger.norm.weight")):
            weights[name] = 1 + 0.1 * noise
        elif name.endswith("A_log"):
            weights[name] = noise.abs()
        elif len(shape) == 1:
            weights[name] = 0.1 * noise
        elif "embed" in name and "patch" not in name:
            weights[name] = 0.05 * noise
        else:
            fan_in = shape[-1] if "experts" in name else noise[0].numel()
            weights[name] = 0.5 * noise * fan_in**-0.5
    weights = {name: each.bfloat16().contiguous() for name, each in weights.items()}
    weights["model.language_model.norm.weight"].view(torch.int16)[0] += last_bit
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(architecture_to_hf(architecture)))


def steps_of(
    work: Path, data: Path, kind: str, layout: dict[str, Any], weights: str = "weights"
) -> list[dict[str, float]]:
    """Trains, and what the log says of each step."""
    out = work / "run"
    if int(os.environ.get("RANK", "0")) == 0:
        shutil.rmtree(out, ignore_errors=True)
    torch.distributed.barrier()
    settings = {
        "data.paths": [str(data)],
        "data.capacity": 4096,
        "data.global_batch": 8,
        "data.pad_multiple": 16,
        "data.workers": 0,
        "model.hf": str(work / kind / "hf"),
        "model.weights": str(work / kind / weights),
        "optimizer.warmup_steps": 1,
        "optimizer.lr": 1e-4,
        "run.steps": STEPS,
        "run.out": str(out),
        "run.tensorboard": False,
        "run.async_save": False,
        **{f"parallel.{name}": value for name, value in layout.items()},
    }
    train(load_config(None, list(settings.items())), device_of_this_process(), resume=False)
    torch.distributed.barrier()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    gc.collect()
    torch.cuda.empty_cache()
    return lines


def fitting(world: int) -> list[str]:
    """Cases for this many processes; those of data parallelism say their number."""
    named = {name: int(name.split(",")[0].split()[-1]) for name in CASES if name.startswith("data")}
    fitting = []
    for name, (_, layout) in CASES.items():
        vision, size = layout.get("vision_gpus", 0), math.prod(layout.get(axis, 1) for axis in ("tp", "cp", "pp", "ep"))
        if vision:
            named[name] = vision + size
        if named.get(name, world) == world and (world - vision) % size == 0:
            fitting.append(name)
    return fitting


def compare(options: argparse.Namespace) -> None:
    groups.initialize()
    rows = earlier(options.out)
    for kind in options.kinds:
        reference = json.loads((options.work / kind / "reference.json").read_text())
        for control, (name, _) in CONTROLS.items():
            found = json.loads((options.work / kind / f"{control}.json").read_text())
            rows[f"{name}, {kind}"] = compared(found, reference)
    for name in options.cases or fitting(torch.distributed.get_world_size()):
        faulthandler.dump_traceback_later(900, exit=True)  # a first step may tune kernels for minutes
        kind, layout = CASES[name]
        if kind not in options.kinds:
            continue
        forget_separation()
        parallel_state.destroy_model_parallel()
        sizes = {"tensor": "tp", "context": "cp", "pipeline": "pp", "expert": "ep"}
        groups.initialize(
            **{size: layout.get(short, 1) for size, short in sizes.items()}, vision=layout.get("vision_gpus", 0)
        )
        begun = time.perf_counter()
        try:
            found = steps_of(options.work, options.data, kind, layout)
        except Exception:
            traceback.print_exc()
            break  # the other ranks may hang in a collective
        rows[name] = compared(found, json.loads((options.work / kind / "reference.json").read_text()))
        if torch.distributed.get_rank() == 0:
            worst = {each: max(rows[name][each]) for each in ("loss", "grad_norm")}
            print(f"{name}: loss {worst['loss']:.1e}, gradient norm {worst['grad_norm']:.1e}", flush=True)
            print(f"  {time.perf_counter() - begun:.0f} s", flush=True)
            write(options.out, rows)
    groups.destroy()


def compared(found: list[dict[str, float]], reference: list[dict[str, float]]) -> dict[str, Any]:
    """Relative differences of every step, and what they were made from."""
    row: dict[str, Any] = {}
    for name in ("loss", "grad_norm"):
        pairs = [(a[name], b[name]) for a, b in zip(found, reference, strict=True)]
        row[name] = [abs(a / b - 1) for a, b in pairs]
        row[f"{name}s"] = [list(pair) for pair in pairs]
    return row


def result_stem(out: Path) -> Path:
    return out / f"train-parity-{datetime.date.today().isoformat()}"


def earlier(out: Path) -> dict[str, Any]:
    """Cases of today that are there already: those given now are added to them."""
    file = result_stem(out).with_suffix(".json")
    return dict(json.loads(file.read_text())) if file.exists() else {}


def write(out: Path, rows: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    stem = result_stem(out)
    stem.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    lines = [
        f"# Layouts against one GPU, {datetime.date.today().isoformat()}",
        "",
        f"`torchrun --nproc-per-node {torch.distributed.get_world_size()} benchmarks/train_parity.py` on "
        f"{torch.distributed.get_world_size()} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}; bf16, "
        f"{STEPS} optimizer steps of 8 packs of real receipts from the same converted weights. Relative difference "
        "from the same steps on one GPU: of the first step, which sees the same weights, and the largest over all "
        "steps (limits: loss 1e-3, gradient norm 1e-2). Rows of one GPU are the noise: the reference a second "
        "time, and with one bit of one weight changed.",
        "",
        "| layout | loss, first step | gradient norm, first step | loss | gradient norm |",
        "|---|---|---|---|---|",
        *(
            f"| {name} | {row['loss'][0]:.1e} | {row['grad_norm'][0]:.1e} | {max(row['loss']):.1e} | "
            f"{max(row['grad_norm']):.1e} |"
            for name, row in rows.items()
        ),
        "",
    ]
    stem.with_suffix(".md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
