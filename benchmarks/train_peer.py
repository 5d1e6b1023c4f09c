"""Training speed of transformers' own model, trained as its users do, beside the bundled trainer on the same samples.

    python benchmarks/train_peer.py --data RECEIPTS --data RECEIPTS_VL --presets 2b qwen3-vl-2b --capacity 16384

The datasets hold the same rows, preprocessed for each family; each preset takes the one of its family. All ways run in
one process, one after the other:

- ours: the bundled trainer's step on full packs of the same samples, without multi-token prediction, which
  transformers does not train either. Its gradients and optimizer state are fp32, those of transformers are bf16. Of
  several values of --recompute it takes the first that fits;
- transformers: ``Qwen3_5ForConditionalGeneration`` or ``Qwen3VLForConditionalGeneration`` in bf16, batches padded to
  their longest sample, fused AdamW, clipped gradients, and the best attention that is installed (FlashAttention 2 or
  4, else torch's; flash-linear-attention and causal-conv1d where the model uses them). Batches are drawn at random, as
  large as fit: the size at which the longest samples of the dataset still train, found by trying;
- checkpointing: the same with activations computed again, and larger batches.

Triton's configurations of the delta net's kernels are those that ours is given, for all ways that run after it.
Pixels and ids are ready on the device before the clock starts, so neither side waits for data. Tokens are true tokens.
Times are over all steps after the warm-up. MFU is the model FLOP of true tokens (`model/flops.py`) over time and the
data sheet's dense bf16 peak. Without CUDA it runs the tiny presets in fp32, as a check of the script.
Writes train-peer-<label>-<date>.json and .md under --out, anew after each way.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import importlib.util
import itertools
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

STARTED = time.monotonic()
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vlmdata import StreamingLoader, VlmDataset, open_dataset
from vlmdata.batch import IGNORE_INDEX
from vlmdata.model.architecture import Architecture
from vlmdata.model.families import architecture_to_hf, preset, spec_of
from vlmdata.model.flops import StepFlops, peak_flops

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
#: Of both sides, and of the bundled trainer's defaults.
LEARNING_RATE, WEIGHT_DECAY, CLIP = 1e-4, 0.1, 1.0
WAYS = ("ours", "transformers", "checkpointing")

Inputs = dict[str, torch.Tensor]


def padded(dataset: VlmDataset, numbers: list[int]) -> Inputs:
    """Samples as a batch of transformers' model, on the right padded to the longest, on the device."""
    samples = [dataset[number] for number in numbers]
    shape = (len(samples), max(sample.length for sample in samples))
    ids, labels = np.zeros(shape, np.int64), np.full(shape, IGNORE_INDEX, np.int64)
    attention = np.zeros(shape, np.int64)
    for row, sample in enumerate(samples):
        n = sample.length
        ids[row, :n], attention[row, :n] = sample.input_ids[:n], 1
        labels[row, :n] = np.where(sample.loss_mask[:n] != 0, sample.input_ids[:n], IGNORE_INDEX)
    kinds = (ids == dataset.manifest.tokenizer.image).astype(np.int64)
    arrays = {"input_ids": ids, "attention_mask": attention, "labels": labels, "mm_token_type_ids": kinds}
    inputs = {name: torch.from_numpy(array).to(DEVICE) for name, array in arrays.items()}
    if grids := [sample.image_grid_thw for sample in samples if len(sample.image_grid_thw)]:
        patches = torch.from_numpy(np.concatenate([sample.patches for sample in samples if len(sample.patches)]))
        family = dataset.manifest.model_family
        inputs["pixel_values"] = family.pixel_values(patches.to(DEVICE), DTYPE)
        inputs["image_grid_thw"] = torch.from_numpy(np.concatenate(grids).astype(np.int64)).to(DEVICE)
    return inputs


def peer_of(architecture: Architecture, checkpointing: bool) -> torch.nn.Module:
    """transformers' model of an architecture, with random weights, in training mode."""
    import transformers

    config = config_of(architecture)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)  # in float32, 35b-a3b would not fit before it is converted
    try:
        with torch.device(DEVICE):
            name = type(config).__name__.replace("Config", "ForConditionalGeneration")
            model: torch.nn.Module = getattr(transformers, name)(config).to(DTYPE)
    finally:
        torch.set_default_dtype(usual)
    if checkpointing:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    return model.train()


def config_of(architecture: Architecture) -> Any:
    """transformers' config of an architecture, with the best attention that is installed."""
    import transformers

    fields = architecture_to_hf(architecture)
    (name,) = fields.pop("architectures")
    config = getattr(transformers, name.replace("ForConditionalGeneration", "Config"))(**fields)
    config._attn_implementation = attention(architecture)
    return config


def attention(architecture: Architecture) -> dict[str, str]:
    """The best attention that is installed for the decoder and for the tower, as transformers names it."""
    if DEVICE.type == "cuda" and importlib.util.find_spec("flash_attn_2_cuda") is not None:
        return dict.fromkeys(("", "text_config", "vision_config"), "flash_attention_2")
    # FlashAttention 4's gradients are wrong for heads whose width is not a multiple of 32 (decision 0026).
    flash = DEVICE.type == "cuda" and importlib.util.find_spec("flash_attn") is not None
    tower = "flash_attention_4" if flash and architecture.vision.head_dim % 32 == 0 else "sdpa"
    decoder = "flash_attention_4" if flash and architecture.language.head_dim <= 128 else "sdpa"
    return {"": decoder, "text_config": decoder, "vision_config": tower}


class PeerStep:
    """An optimizer step as users of transformers make it."""

    def __init__(self, model: torch.nn.Module):
        self.model = model
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=DEVICE.type == "cuda"
        )

    def __call__(self, batch: Inputs) -> float:
        """Trains on a batch and returns its loss."""
        loss: torch.Tensor = self.model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


def largest(fits: Callable[[int], bool], limit: int, start: int = 1) -> int:
    """The largest number up to a limit that fits, if every smaller one does; 0 if none.

    Begins with ``start``, doubles until one does not fit, then halves the gap.
    """
    low, high = 0, min(start, limit)
    while high <= limit and fits(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def emptied() -> None:
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def largest_batch(step: PeerStep, dataset: VlmDataset, options: argparse.Namespace) -> int:
    """The largest batch of the dataset's longest samples that trains without running out of memory.

    Weights stay as they are.
    """
    longest = np.argsort(-dataset.index.lengths, kind="stable").tolist()
    (group,) = step.optimizer.param_groups
    group["lr"] = 0.0

    def fits(count: int) -> bool:
        try:
            step(padded(dataset, longest[:count]))
        except torch.OutOfMemoryError:
            fitted = False
        else:
            fitted = True
        step.optimizer.zero_grad(set_to_none=True)
        emptied()  # after the exception is gone, which holds the activations
        return fitted

    # The first step makes the optimizer's state, which must be there when larger batches are tried.
    count = largest(fits, min(options.largest, len(dataset)), options.start) if fits(1) else 0
    step.optimizer.state.clear()
    group["lr"] = LEARNING_RATE
    return count


def of_samples(dataset: VlmDataset, numbers: list[int], flops: StepFlops) -> tuple[int, float]:
    """True tokens of samples, and their model FLOP with those of the targets."""
    samples = [dataset[number] for number in numbers]
    lengths = np.array([sample.length for sample in samples])
    grids = [sample.image_grid_thw.prod(1) for sample in samples if len(sample.image_grid_thw)]
    targets = sum(int(np.count_nonzero(sample.loss_mask[: sample.length])) for sample in samples)
    patches = np.concatenate(grids) if grids else np.zeros(0, np.int64)
    return int(lengths.sum()), flops.of(lengths, patches) + flops.per_target * targets


def time_peer(
    architecture: Architecture, dataset: VlmDataset, checkpointing: bool, options: argparse.Namespace
) -> dict[str, Any]:
    """Figures of transformers' model at its largest batch."""
    emptied()
    step = PeerStep(peer_of(architecture, checkpointing))
    count = options.batch or largest_batch(step, dataset, options)
    while count:
        emptied()
        try:
            return time_batches(step, architecture, dataset, count, options)
        except torch.OutOfMemoryError:
            # Batches of other lengths leave gaps in the allocator's memory, which the search did not meet.
            print(f"  batches of {count} run out of memory after all", flush=True)
        del step
        emptied()
        step, count = PeerStep(peer_of(architecture, checkpointing)), count - 1
    return {"batch": 0}


def time_batches(
    step: PeerStep,
    architecture: Architecture,
    dataset: VlmDataset,
    count: int,
    options: argparse.Namespace,
    by_length: bool = False,
) -> dict[str, Any]:
    """Figures of transformers' model with batches of so many samples, at random or of similar length."""
    order = np.random.default_rng(0).permutation(len(dataset))
    if by_length:
        order = grouped(order, dataset.index.lengths, count)
    cycle = order.tolist() * -(-options.steps * count // len(order))
    chosen = [cycle[i * count : (i + 1) * count] for i in range(options.steps)]
    batches = [padded(dataset, numbers) for numbers in chosen]
    flops = spec_of(architecture).step_flops(architecture, False, ())
    counts = [of_samples(dataset, numbers, flops) for numbers in chosen]
    slots = sum(batch["input_ids"].numel() for batch in batches)
    seconds, losses = timed(step, batches, options)
    return figures(seconds, counts, slots, losses) | {"batch": count, "attention": attention(architecture)}


def grouped(order: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """Sorts each 50 batches of a random order by length, as transformers' sampler does, and mixes the whole batches."""
    parts = [
        part[np.argsort(-lengths[part], kind="stable")]
        for part in np.split(order, range(50 * count, len(order), 50 * count))
    ]
    order = np.concatenate(parts)
    whole = order[: len(order) // count * count].reshape(-1, count)
    return np.random.default_rng(1).permutation(whole).reshape(-1)


def time_ours(
    architecture: Architecture, configs: Sequence[Any], dataset: VlmDataset, options: argparse.Namespace
) -> dict[str, Any]:
    """Figures of the bundled trainer's step with the first configuration that fits; needs process groups."""
    from vlmdata.model.training.kernels import compile_ahead

    with compile_ahead(configs[0]) or contextlib.nullcontext() as kernels:
        if kernels is not None:
            kernels.wait(print)
    for config in configs:
        try:
            found = time_packs(architecture, config, dataset, options)
        except torch.OutOfMemoryError:
            continue
        return found | {"recompute": config.model.recompute, "vision_recompute": config.model.vision_recompute}
    return {"batch": 0}


def time_packs(
    architecture: Architecture, config: Any, dataset: VlmDataset, options: argparse.Namespace
) -> dict[str, Any]:
    """Figures of the bundled trainer's step, a pack each."""
    from vlmdata.model.training.build import build
    from vlmdata.model.training.data import RankPlace
    from vlmdata.model.training.optimizer.learner import build_learner
    from vlmdata.model.training.step import Stepper

    emptied()
    place = RankPlace.here()
    model = build(config, architecture, place, DEVICE)
    flops = spec_of(architecture).step_flops(architecture, False, ())
    stepper = Stepper(build_learner(model, config, DEVICE, DTYPE), place, 1, options.capacity, flops, DEVICE)
    loading = {"capacity": options.capacity, "global_batch": 1, "num_workers": 0}
    with StreamingLoader(dataset.directory, **loading, pad_to_capacity=True) as loader:
        # The epoch's last pack may be nearly empty, which says nothing where the dataset is small.
        full = (batch for batch in loader if batch.true_tokens > 0.9 * options.capacity)
        batches = [batch.clone().to(DEVICE) for batch in itertools.islice(full, options.steps)]
    if not batches:
        raise SystemExit(f"no pack of {options.capacity} tokens is full: add rows, or set a smaller --capacity")
    counts = [of_samples(dataset, [origin.index for origin in batch.origins], flops) for batch in batches]

    def step(batch: Any) -> float:
        return stepper(iter([batch])).loss

    seconds, losses = timed(step, batches, options)
    return figures(seconds, counts, sum(batch.total_tokens for batch in batches), losses) | {"batch": "packs"}


def timed(step: Callable[[Any], float], batches: list[Any], options: argparse.Namespace) -> tuple[float, list[float]]:
    """Seconds of one pass over the batches after a warm-up with the same batches, and the losses of all steps."""
    losses = [step(batch) for batch in itertools.islice(itertools.cycle(batches), options.warmup)]
    synchronise()
    begun = time.perf_counter()
    losses += [step(batch) for batch in batches]
    synchronise()
    return time.perf_counter() - begun, losses


def synchronise() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def figures(seconds: float, counts: list[tuple[int, float]], slots: int, losses: list[float]) -> dict[str, Any]:
    tokens, work = sum(each[0] for each in counts), sum(each[1] for each in counts)
    return {
        "tokens_per_second": tokens / seconds,
        "fill": tokens / slots,
        "seconds_per_step": seconds / len(counts),
        "mfu": work / seconds / (peak_flops(DEVICE) or float("nan")),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if DEVICE.type == "cuda" else float("nan"),
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def measure(name: str, datasets: list[VlmDataset], options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """The ways of a preset, each with its figures."""
    from vlmdata.model.training.build import architecture_of

    dataset = dataset_of(name, datasets)
    configs = configs_of(name, dataset, options)
    architecture = architecture_of(configs[0])
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "ours": lambda: time_ours(architecture, configs, dataset, options),
        "transformers": lambda: time_peer(architecture, dataset, False, options),
        "checkpointing": lambda: time_peer(architecture, dataset, True, options),
    }
    for way in options.ways:
        if time.monotonic() - STARTED > options.limit:
            print(f"  {name} {way}: left out, --limit has passed", flush=True)
            continue
        emptied()
        left = torch.cuda.memory_allocated() / 2**30 if DEVICE.type == "cuda" else 0.0  # by the ways before
        begun = time.monotonic()
        found = ways[way]() | {"gib_before": left, "way_seconds": time.monotonic() - begun}
        print(f"  {name} {way}: {json.dumps(found)}", flush=True)
        yield way, found


def dataset_of(name: str, datasets: Sequence[VlmDataset]) -> VlmDataset:
    """The first dataset that is for a preset's family."""
    wanted = preset(name).data_family
    found = [dataset for dataset in datasets if dataset.manifest.model_family.name == wanted]
    if not found:
        raise SystemExit(f"{name} needs data of the family {wanted}: add --data with such a dataset")
    return found[0]


def configs_of(name: str, dataset: VlmDataset, options: argparse.Namespace) -> list[Any]:
    """Configurations of the bundled trainer for a preset: one for each of --recompute."""
    from vlmdata.model.training.settings.config_loading import load_config

    settings: list[tuple[str, Any]] = [
        ("data.paths", [str(dataset.directory)]),
        ("data.capacity", options.capacity),
        ("data.global_batch", 1),
        ("model.preset", name),
        ("model.mtp", False),
        ("optimizer.lr", LEARNING_RATE),
        ("optimizer.weight_decay", WEIGHT_DECAY),
        ("optimizer.clip_grad", CLIP),
        ("optimizer.warmup_steps", 0),
        ("optimizer.schedule", "constant"),
        ("run.steps", options.warmup + options.steps),
    ]
    return [load_config(None, [*settings, *recomputing(each)]) for each in options.recompute]


def recomputing(text: str) -> list[tuple[str, Any]]:
    """Settings of what ours computes again: ``none``, ``selective`` or ``full``, ``+vision`` for the tower's blocks."""
    language, *vision = text.split("+")
    return [("model.recompute", language), ("model.vision_recompute", vision == ["vision"])]


def rows(results: dict[str, dict[str, dict[str, Any]]], first: str) -> Iterator[str]:
    """Lines of the report's table; ``first`` is the way to which the others are compared."""
    for name, ways in results.items():
        ours = ways.get(first, {}).get("tokens_per_second")
        for way, found in ways.items():
            if not found["batch"]:
                yield f"| {name} | {way} | does not fit | | | | | |"
                continue
            speed = found["tokens_per_second"]
            relative = f"{speed / ours:.2f}" if ours else ""
            again = found.get("recompute", "none")
            label = "transformers, checkpointing" if way == "checkpointing" else way
            label += f", recompute={again}" * (again != "none")
            label += ", vision_recompute" * found.get("vision_recompute", False)
            yield (
                f"| {name} | {label} | {found['batch']} | {speed:,.0f} | {relative} | {found['fill']:.0%} | "
                f"{found['mfu']:.1%} | {found['peak_gib']:.1f} GiB |"
            )


def report(about: dict[str, Any], title: str, first: str) -> str:
    """The results as Markdown, relative to the way ``first``."""
    return "\n".join(
        [
            f"# {title}, {about['date']}",
            "",
            f"- `{about['command']}`",
            "",
            f"On {about['device']}; torch {about['torch']}, transformers {about['transformers']}. {about['note']}",
            "",
            f"| model | way | batch | real tokens/s | relative to {first} | filled | MFU | peak memory |",
            "|---|---|---|---|---|---|---|---|",
            *rows(about["presets"], first),
            "",
        ]
    )


def about_run(script: str, note: str) -> dict[str, Any]:
    """What a result says of its run, with no presets yet."""
    import transformers

    return {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", f"benchmarks/{script}", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name(DEVICE) if DEVICE.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "note": note,
        "presets": {},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, action="append", required=True, help="a dataset; repeat for each family")
    parser.add_argument("--presets", nargs="+", default=["2b", "qwen3-vl-2b"])
    parser.add_argument("--capacity", type=int, default=16384, help="tokens of a pack of ours")
    parser.add_argument("--batch", type=int, help="samples of a batch of transformers; default: as many as fit")
    parser.add_argument("--largest", type=int, default=64, help="the largest batch to try")
    parser.add_argument("--start", type=int, default=1, help="the batch with which the search for the largest begins")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=8)
    parser.add_argument(
        "--recompute",
        nargs="+",
        default=["none"],
        help="what ours computes again, the first that fits: none, selective, full; +vision adds the tower's blocks",
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which no way begins")
    parser.add_argument("--label", default="", help="of the result files")
    parser.add_argument("--note", default="", help="a sentence for the result")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    options = parser.parse_args()
    from vlmdata.model.parallel.environment import before_megatron

    before_megatron()

    from vlmdata.model.parallel import groups
    from vlmdata.model.parallel.cpu_mode import cpu_mode_if_needed

    groups.initialize()
    datasets = [open_dataset(path) for path in options.data]
    about = about_run("train_peer.py", options.note)
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / "-".join(filter(None, ["train-peer", options.label, about["date"]]))
    with cpu_mode_if_needed():
        for name in options.presets:
            ways = about["presets"][name] = {}
            for way, found in measure(name, datasets, options):
                ways[way] = found
                stem.with_suffix(".json").write_text(json.dumps(about, indent=2) + "\n")
                stem.with_suffix(".md").write_text(
                    report(about, "transformers' model beside the bundled trainer", "ours")
                )
    groups.destroy()
    print(stem.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
