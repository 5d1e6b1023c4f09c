"""Training speed on one GPU: packed against padded, and against stock megatron-core's language model alone.

    python benchmarks/train_speed.py --data DIR --presets 0.8b 2b --capacity 16384

All ways run in one process, one after the other, on the same samples in the same order, with the same optimizer:

- packed: the bundled trainer's step on the loader's packs (the epoch's last one, if not full, left out), vision
  included;
- packed, cuDNN: the same with Transformer Engine's attention in the vision tower, where the first takes
  FlashAttention 4 if that is installed;
- packed, mtp: the first with multi-token prediction;
- packed, tower frozen: the first with the vision blocks not trained, as is usual in fine-tuning (the merger is);
- padded: the same samples in rectangles, each of as many samples, in their order, as fit the capacity when padded to
  the longest of them, which is better than the usual fixed number of samples;
- stock: megatron-core's own GPTModel with its own specs for these sizes, language model only, on the packs' tokens. As
  it comes it computes the logits of all tokens, where the bundled model computes those of targets; its FLOP count them.

Tokens are true tokens. Times are medians over steps after the warm-up, which sees the same batches: kernels are
compiled and tuned for shapes, of which padded batches of a long-tailed dataset have as many as there are batches. MFU
is model FLOP (`model/flops.py`; vision only where it runs) over time and the data sheet's dense bf16 peak.
Without CUDA it runs on the CPU, as a check of the script (--presets tiny).
Writes train-speed-<label>-<date>.json and .md under --out; presets measured earlier that day stay in.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import fcntl
import gc
import importlib.metadata
import itertools
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vlmdata.model.families.qwen3_5.spec import step_flops
from vlmdata.model.parallel.environment import before_megatron

before_megatron()

from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams

from vlmdata import PackedBatch, StreamingLoader, VlmDataset, open_dataset
from vlmdata.batch import IGNORE_INDEX, SampleOrigin
from vlmdata.model.families.qwen3_5.architecture import Qwen35Architecture
from vlmdata.model.families.qwen3_5.build import build_model, language_config
from vlmdata.model.flops import StepFlops, peak_flops
from vlmdata.model.metrics import MetricSums
from vlmdata.model.parallel import groups
from vlmdata.model.parallel.cpu_mode import cpu_mode_if_needed
from vlmdata.model.training.build import architecture_of
from vlmdata.model.training.data import RankPlace
from vlmdata.model.training.optimizer.learner import build_learner, freeze
from vlmdata.model.training.settings.config import TrainConfig
from vlmdata.model.training.settings.config_loading import load_config
from vlmdata.model.training.settings.model_settings import settings_of
from vlmdata.model.training.step import Stepper

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32


class StockLanguageModel(torch.nn.Module):
    """megatron-core's GPTModel as it comes, fed with our batches."""

    def __init__(self, architecture: Qwen35Architecture, config: TrainConfig):
        super().__init__()
        settings = dataclasses.replace(settings_of(config, architecture, DEVICE.type == "cuda"), mtp_layers=0)
        self.config = language_config(architecture, settings)
        language = architecture.language
        self.model = GPTModel(
            self.config,
            get_transformer_block_with_experimental_attention_variant_spec(self.config),
            vocab_size=-(-language.vocab_size // 128) * 128,
            max_sequence_length=language.max_position_embeddings,
            position_embedding_type="rope",
            rotary_percent=language.partial_rotary_factor,
            rotary_base=int(language.rope_theta),
            share_embeddings_and_output_weights=architecture.tie_embeddings,
        )
        self.metrics, self.metric_names = MetricSums(), ()
        self.model_type = self.model.model_type
        self.share_embeddings_and_output_weights = architecture.tie_embeddings
        self.pre_process = self.post_process = True
        self.pg_collection = self.model.pg_collection

    def set_input_tensor(self, tensor: Any) -> None:
        self.model.set_input_tensor(tensor)

    def shared_embedding_or_output_weight(self) -> Any:
        return self.model.shared_embedding_or_output_weight()

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        bounds = batch.cu_seqlens_padded
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=batch.max_seqlen,
            max_seqlen_kv=batch.max_seqlen,
        )
        losses = self.model(
            batch.input_ids,
            batch.position_ids[0],
            None,
            labels=batch.labels.clamp(min=0),
            packed_seq_params=packed,
        )
        return torch.where(batch.labels != IGNORE_INDEX, losses.float(), 0.0)


def rectangles(lengths: np.ndarray, order: list[int], capacity: int) -> Iterator[list[int]]:
    """As many samples at a time, in their order, as fit the capacity when each is as long as the longest of them."""
    chosen: list[int] = []
    for number in order:
        if chosen and max(lengths[[*chosen, number]]) * (len(chosen) + 1) > capacity:
            yield chosen
            chosen = []
        chosen.append(number)


def padded_batches(dataset: VlmDataset, order: list[int], capacity: int) -> Iterator[PackedBatch]:
    """The samples as rectangles, each padded to its longest; the last one, which may be small, is left out."""
    for rectangle, numbers in enumerate(rectangles(dataset.index.lengths, order, capacity)):
        chosen = [dataset[number] for number in numbers]
        rows, longest = len(chosen), max(sample.length for sample in chosen)
        shape = (rows, longest)
        ids, mask = np.zeros(shape, np.int64), np.zeros(shape, np.uint8)
        positions, padding = np.zeros((3, *shape), np.int64), np.ones(shape, np.bool_)
        for row, sample in enumerate(chosen):
            n = sample.length
            ids[row, :n], mask[row, :n] = sample.input_ids[:n], sample.loss_mask[:n]
            positions[:, row, :n], padding[row, :n] = sample.position_ids[:, :n], False
        labels = np.full(shape, IGNORE_INDEX, np.int64)
        labels[:, :-1] = np.where(mask[:, 1:] != 0, ids[:, 1:], IGNORE_INDEX)
        image = dataset.manifest.tokenizer.image
        first = (ids == image) & (np.roll(ids, 1, 1) != image)
        grids = np.concatenate([sample.image_grid_thw for sample in chosen]).astype(np.int64)
        assert first.sum() == len(grids), "neighbouring images are not told apart here"
        lengths = np.array([sample.length for sample in chosen])
        yield PackedBatch(
            input_ids=torch.from_numpy(ids.reshape(1, -1)),
            labels=torch.from_numpy(labels.reshape(1, -1)),
            loss_mask=torch.from_numpy((labels != IGNORE_INDEX).astype(np.float32).reshape(1, -1)),
            position_ids=torch.from_numpy(positions.reshape(3, 1, -1)),
            padding_mask=torch.from_numpy(padding.reshape(1, -1)),
            cu_seqlens=torch.from_numpy(np.concatenate([[0], lengths.cumsum()]).astype(np.int32)),
            cu_seqlens_padded=torch.arange(rows + 1, dtype=torch.int32) * longest,
            max_seqlen=longest,
            total_tokens=rows * longest,
            true_tokens=int(lengths.sum()),
            image_grid_thw=torch.from_numpy(grids),
            image_starts=torch.from_numpy(np.flatnonzero(first.reshape(-1))),
            image_indices=torch.arange(len(grids)),
            patches=torch.from_numpy(np.concatenate([sample.patches for sample in chosen])),
            sample_keys=tuple(sample.key for sample in chosen),
            origins=tuple(SampleOrigin(0, 0, 0, number) for number in numbers),
            epoch=0,
            step=0,
            micro_batch=0,
            pack=rectangle,
        )


def timed(
    model: torch.nn.Module,
    batches: list[PackedBatch],
    config: TrainConfig,
    flops: StepFlops,
    per_step: int,
    steps: int,
    warmup: int,
) -> dict[str, Any]:
    """Median figures of optimizer steps over batches that are on the device already."""
    learner = build_learner(model, config, DEVICE, DTYPE)
    stepper = Stepper(learner, RankPlace.here(), per_step, config.data.capacity, flops, DEVICE)
    batches = batches[: per_step * steps]
    stream = itertools.cycle(batches)
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    results = []
    launched = stepper.launch(stream)
    for step in range(warmup + steps):
        following = stepper.launch(stream)  # as in train.py
        result = stepper.finish(launched)
        launched = following
        if step >= warmup:
            results.append((result, result.seconds))
        elif step in (0, 1):
            said = f"loss {result.loss:.3f}, grad {result.grad_norm:.1f}"
            print(f"    step {step}: {result.seconds:.1f} s, {said}", flush=True)
    stepper.finish(launched)
    seconds = median(each for _, each in results)
    tokens = sum(result.tokens for result, _ in results) / len(results)
    work = sum(result.flops for result, _ in results) / len(results)
    slots = sum(batch.total_tokens for batch in batches) / len(batches) * per_step
    return {
        "seconds": seconds,
        "tokens": tokens,
        "computed_tokens": slots,
        "tokens_per_second": sum(r.tokens for r, _ in results) / sum(s for _, s in results),
        "tflops": work / (sum(s for _, s in results) / len(results)) / 1e12,
        "mfu": work / (sum(s for _, s in results) / len(results)) / (peak_flops(DEVICE) or float("nan")),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if DEVICE.type == "cuda" else float("nan"),
        "loss": results[-1][0].loss,
    }


def flash_attention_version() -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("flash-attn-4")
    return None


def of_stock(flops: StepFlops) -> StepFlops:
    """No vision, and logits of all tokens: stock megatron-core computes those, where ours computes targets' only."""
    per_token = flops.per_token + flops.per_target
    return dataclasses.replace(flops, per_token=per_token, per_target=0, per_patch=0, per_patch_squared=0)


def measure(preset: str, options: argparse.Namespace) -> dict[str, Any]:
    config = load_config(
        None,
        [
            ("data.paths", [str(options.data)]),
            ("data.capacity", options.capacity),
            ("data.global_batch", 1),
            ("model.preset", preset),
            ("model.recompute", options.recompute),
            ("optimizer.warmup_steps", 1),
            ("optimizer.overlap", False),
        ],
    )
    architecture = architecture_of(config)
    dataset = open_dataset(options.data)
    loader = StreamingLoader(
        options.data, capacity=options.capacity, global_batch=1, num_workers=0, pad_to_capacity=True
    )
    with loader:
        packed = [batch.clone().to(DEVICE) for batch in loader if batch.true_tokens > 0.9 * options.capacity]
    order = np.random.default_rng(0).permutation(len(dataset)).tolist()
    padded = [batch.to(DEVICE) for batch in padded_batches(dataset, order, options.capacity)]
    plain = step_flops(architecture, mtp=False)
    settings = settings_of(config, architecture, DEVICE.type == "cuda")

    def ours(mtp: int = 0, attention: str = "auto", frozen: tuple[str, ...] = ()) -> Callable[[], torch.nn.Module]:
        changed = dataclasses.replace(settings, mtp_layers=mtp, vision_attention=attention)

        def make() -> torch.nn.Module:
            model = build_model(architecture, changed).to(DEVICE)
            freeze(model, frozen)
            return model

        return make

    ways: dict[str, tuple[Callable[[], torch.nn.Module], list[PackedBatch], StepFlops]] = {
        "packed": (ours(), packed, plain),
        "packed, cuDNN": (ours(attention="transformer_engine"), packed, plain),
        "padded": (ours(), padded, plain),
        "stock": (lambda: StockLanguageModel(architecture, config).to(DEVICE), packed, of_stock(plain)),
        "packed, mtp": (ours(1), packed, step_flops(architecture, mtp=True)),
        "packed, tower frozen": (
            ours(frozen=("vision",)),
            packed,
            step_flops(architecture, mtp=False, frozen=("vision",)),
        ),
    }
    found = {}
    for name in options.ways or ways:
        make, batches, flops = ways[name]
        print(f"  {preset} {name}: {len(batches)} batches", flush=True)
        model = make()
        found[name] = timed(model, batches, config, flops, options.micro_batches, options.steps, options.warmup)
        print(f"    {json.dumps({k: round(v, 4) for k, v in found[name].items()})}", flush=True)
        del model
        gc.collect()
        torch.cuda.empty_cache()
    return found


def report(results: dict[str, Any]) -> str:
    lines = [
        f"# Training speed, {results['date']}",
        "",
        *(f"- `{command}`" for command in results["commands"]),
        "",
        f"On one {results['gpu']}; torch {results['torch']}, FlashAttention 4 "
        f"{results['flash_attention_4'] or 'not installed'}. {results['note']} {results['samples']} samples, "
        f"{results['mean_length']:.0f} tokens each in the mean, {results['longest']} at most.",
        "",
        "| model | way | real tokens/s | tokens computed a step | seconds a step | MFU | peak memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for preset, ways in results["presets"].items():
        for name, found in ways.items():
            lines.append(
                f"| {preset} | {name} | {found['tokens_per_second']:,.0f} | {found['computed_tokens']:,.0f} | "
                f"{found['seconds']:.3f} | {found['mfu']:.1%} | {found['peak_gib']:.1f} GiB |"
            )
    lines.append("")
    for preset, ways in results["presets"].items():
        for ours, other in (("packed", "padded"), ("packed", "stock"), ("packed, tower frozen", "stock")):
            if ours in ways and other in ways:
                ratio = ways[ours]["tokens_per_second"] / ways[other]["tokens_per_second"]
                lines.append(f"- {preset}: {ours} over {other}: {ratio:.2f}")
    return "\n".join([*lines, ""])


def add(about: dict[str, Any], preset: str, found: dict[str, Any], stem: Path) -> None:
    """Puts a preset into today's results; processes on several GPUs may do so at once."""
    command = shlex.join(["python", "benchmarks/train_speed.py", *sys.argv[1:]])
    with stem.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        file = stem.with_suffix(".json")
        earlier = json.loads(file.read_text()) if file.exists() else {"commands": [], "presets": {}}
        commands = list(dict.fromkeys([*earlier["commands"], command]))
        results = {**about, "commands": commands, "presets": {**earlier["presets"], preset: found}}
        file.write_text(json.dumps(results, indent=2) + "\n")
        stem.with_suffix(".md").write_text(report(results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--presets", nargs="+", default=["0.8b", "2b"])
    parser.add_argument("--ways", nargs="*", help="of those above, such as packed 'packed, mtp' stock; default: all")
    parser.add_argument("--capacity", type=int, default=16384)
    parser.add_argument("--micro-batches", type=int, default=4, help="packs, or rectangles, of an optimizer step")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, help="steps before those that are timed; default: as many as these")
    parser.add_argument("--recompute", default="none")
    parser.add_argument("--label", default="", help="of the result files, such as the name of the data")
    parser.add_argument("--note", default="", help="a sentence for the result, such as what else the machine did")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    options = parser.parse_args()
    options.warmup = options.steps if options.warmup is None else options.warmup
    groups.initialize()
    dataset = open_dataset(options.data)
    today = datetime.date.today().isoformat()
    stem = options.out / "-".join(filter(None, ["train-speed", options.label, today]))
    options.out.mkdir(parents=True, exist_ok=True)
    about = {
        "date": today,
        "note": options.note,
        "gpu": torch.cuda.get_device_name(0) if DEVICE.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "flash_attention_4": flash_attention_version(),
        "samples": len(dataset),
        "mean_length": float(np.mean(dataset.index.lengths)),
        "longest": int(np.max(dataset.index.lengths)),
    }
    for preset in options.presets:
        add(about, preset, measure(preset, options), stem)
    print(stem.with_suffix(".md").read_text())
    groups.destroy()


if __name__ == "__main__":
    with cpu_mode_if_needed():  # as a check of the script
        main()
