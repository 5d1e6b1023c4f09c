"""Layers with experts at their true width, forward and backward, beside dense layers of the same active FLOP.

    python benchmarks/expert_layers.py --data CHATS --presets 35b-a3b qwen3-vl-30b-a3b --layers 4 --capacity 16384

A model keeps the width of its preset, but has --layers layers and the vocabulary of the data, and trains on packs of
texts. Three forms of it run one after the other in the bundled trainer:

- experts: the preset's feed-forward layers;
- dense: as wide as the experts of a token together, so with the same FLOP per token;
- narrow: of width 128, which tells what the rest of the model takes.

Times are medians of forward and backward, without the optimizer, by the clock (`seconds`), and sums of kernels of one
profiled pass (`kernels`). `whole` is the time of dense over that of experts; `feed-forward` the same after the time of
narrow is taken from both. By the clock it says nothing where the host is slower than the GPU. Weights are random.
Without CUDA it runs the tiny presets, as a check of the script.
Writes expert-layers-<label>-<date>.json and .md under --out.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from train_peer import DEVICE, DTYPE, about_run, configs_of, dataset_of, emptied, synchronise

from vlmdata import PackedBatch, StreamingLoader, VlmDataset, open_dataset
from vlmdata.model.architecture import Architecture
from vlmdata.model.families import preset, spec_of
from vlmdata.model.flops import peak_flops

#: Width of the feed-forward layers of the form that shows what the rest takes.
NARROW = 128


def forms(architecture: Architecture) -> dict[str, Architecture]:
    """The model with experts, with dense layers of the same FLOP, and with narrow ones."""
    moe = architecture.language.moe
    assert moe is not None, "a preset with experts"
    active = moe.num_experts_per_tok * moe.intermediate_size + moe.shared_expert_intermediate_size

    def dense(width: int) -> Architecture:
        return dataclasses.replace(
            architecture, language=dataclasses.replace(architecture.language, moe=None, intermediate_size=width)
        )

    return {"experts": architecture, "dense": dense(active), "narrow": dense(NARROW)}


def shortened(architecture: Architecture, layers: int, dataset: VlmDataset) -> Architecture:
    """The first layers of an architecture, with the vocabulary of a dataset."""
    language: Any = architecture.language
    if hasattr(language, "layer_types"):
        language = dataclasses.replace(language, layer_types=language.layer_types[:layers])
    else:
        language = dataclasses.replace(language, layers=layers)
    tokenizer = dataset.manifest.tokenizer
    return dataclasses.replace(architecture, language=language).with_vocabulary(tokenizer, tokenizer.vocab_size)


def time_form(
    name: str, architecture: Architecture, dataset: VlmDataset, options: argparse.Namespace
) -> dict[str, Any]:
    """Seconds, MFU and memory of a form."""
    from vlmdata.model.training.build import build
    from vlmdata.model.training.data import RankPlace
    from vlmdata.model.training.optimizer.learner import build_learner
    from vlmdata.model.training.step import run_passes

    emptied()
    (config,) = configs_of(name, dataset, options)
    learner = build_learner(build(config, architecture, RankPlace.here(), DEVICE), config, DEVICE, DTYPE)
    flops = spec_of(architecture).step_flops(architecture, False, ())
    batches = full_packs(dataset, options)

    def passes(batch: PackedBatch) -> float:
        for chunk in learner.model:
            chunk.zero_grad_buffer()
        begun = time.perf_counter()
        run_passes(learner, None, iter([batch]), (), 1, options.capacity)
        synchronise()
        return time.perf_counter() - begun

    for batch in itertools.islice(itertools.cycle(batches), options.warmup):
        passes(batch)
    seconds = [passes(batch) for batch in itertools.islice(itertools.cycle(batches), options.steps)]
    kernels = profiled(f"{name}-{architecture.language.intermediate_size}", lambda: passes(batches[0]), options)
    work = [of_pack(batch, flops) for batch in itertools.islice(itertools.cycle(batches), options.steps)]
    return {
        "seconds": median(seconds),
        "least": min(seconds),
        "most": max(seconds),
        "kernels": kernels,
        "mfu": sum(work) / sum(seconds) / (peak_flops(DEVICE) or float("nan")),
        "tflop": sum(work) / len(work) / 1e12,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if DEVICE.type == "cuda" else float("nan"),
    }


def full_packs(dataset: VlmDataset, options: argparse.Namespace) -> list[PackedBatch]:
    """A few full packs, on the device."""
    loading = {"capacity": options.capacity, "global_batch": 1, "num_workers": 0}
    with StreamingLoader(dataset.directory, **loading, pad_to_capacity=True) as loader:
        full = (batch for batch in loader if batch.true_tokens > 0.9 * options.capacity)
        found = [batch.clone().to(DEVICE) for batch in itertools.islice(full, 4)]
    if not found:
        raise SystemExit(f"no pack of {options.capacity} tokens is full: add rows, or set a smaller --capacity")
    return found


def of_pack(batch: PackedBatch, flops: Any) -> float:
    """Model FLOP of a pack of texts."""
    lengths = np.diff(batch.host.cu_seqlens)
    return float(flops.of(lengths, np.zeros(0, np.int64)) + flops.per_target * int(batch.loss_mask.sum()))


def profiled(name: str, run: Callable[[], float], options: argparse.Namespace) -> float:
    """Seconds in kernels of one forward and backward. With --profile, writes the longest."""
    with torch.profiler.profile() as profile:
        run()
    found = profile.key_averages()
    if options.profile:
        order = "self_cuda_time_total" if DEVICE.type == "cuda" else "self_cpu_time_total"
        rows = found.table(sort_by=order, row_limit=70, max_name_column_width=90)
        (options.out / f"expert-layers-{name}.txt").write_text(rows)
    on_device = (each for each in found if each.device_type == torch.autograd.DeviceType.CUDA)
    return float(sum(each.self_device_time_total for each in on_device if "Buffer" not in each.key)) / 1e6


def ratios(found: dict[str, dict[str, Any]], of: str) -> dict[str, float]:
    """Dense relative to experts, by the clock or in kernels, of the whole model and of the feed-forward layers."""
    experts, dense, narrow = (found[form][of] for form in ("experts", "dense", "narrow"))
    whole = dense / experts if experts else float("nan")
    rest = (dense - narrow) / (experts - narrow) if experts != narrow else float("nan")
    return {"whole": whole, "feed_forward": rest}


def report(about: dict[str, Any]) -> str:
    """The results as Markdown."""
    head = [f"# Layers with experts beside dense ones, {about['date']}", "", f"- `{about['command']}`", ""]
    head += [f"On {about['device']}; torch {about['torch']}. {about['note']}", ""]
    table = ["| preset | form | ms | ms in kernels | MFU | peak memory |", "|---|---|---|---|---|---|"]
    compared = ["| preset | measured | whole | feed-forward |", "|---|---|---|---|"]
    for name, row in about["presets"].items():
        for form, each in row["forms"].items():
            table.append(
                f"| {name} | {form} | {each['seconds'] * 1e3:.1f} | {each['kernels'] * 1e3:.1f} | {each['mfu']:.1%} | "
                f"{each['peak_gib']:.1f} GiB |"
            )
        for of, values in row.get("ratios", {}).items():
            compared.append(f"| {name} | {of} | {values['whole']:.2f} | {values['feed_forward']:.2f} |")
    return "\n".join([*head, *table, "", "Dense relative to experts:", "", *compared, ""])


def each_result(options: argparse.Namespace, about: dict[str, Any]) -> Iterator[None]:
    """Measures all forms and adds them to the result, one after the other."""
    datasets = [open_dataset(path) for path in options.data]
    for name in options.presets:
        dataset = dataset_of(name, datasets)
        row = about["presets"][name] = {"forms": {}}
        for form, architecture in forms(shortened(preset(name), options.layers, dataset)).items():
            row["forms"][form] = time_form(name, architecture, dataset, options)
            print(f"  {name} {form}: {json.dumps(row['forms'][form])}", flush=True)
            yield
        row["ratios"] = {of: ratios(row["forms"], of) for of in ("seconds", "kernels")}
        yield


def main() -> None:
    """Measures and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, action="append", required=True, help="texts; one dataset for each family")
    parser.add_argument("--presets", nargs="+", default=["35b-a3b", "qwen3-vl-30b-a3b"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--capacity", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--profile", action="store_true", help="write the longest kernels of each form")
    parser.add_argument("--label", default="")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    options = parser.parse_args()
    options.recompute = ["none"]
    from vlmdata.model.parallel.environment import before_megatron

    before_megatron()

    from vlmdata.model.parallel import groups
    from vlmdata.model.parallel.cpu_mode import cpu_mode_if_needed

    groups.initialize()
    note = f"{options.layers} layers of true width, packs of {options.capacity:,} tokens of texts; random weights."
    about = about_run("expert_layers.py", note)
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / "-".join(filter(None, ["expert-layers", options.label, about["date"]]))
    with cpu_mode_if_needed():
        for _ in each_result(options, about):
            stem.with_suffix(".json").write_text(json.dumps(about, indent=2) + "\n")
            stem.with_suffix(".md").write_text(report(about))
    groups.destroy()
    print(stem.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
