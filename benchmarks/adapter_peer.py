r"""transformers' own model on padded batches, with Liger's kernels too, beside packs and the bundled trainer.

    python benchmarks/adapter_peer.py --data receipts=RECEIPTS --data receipts=RECEIPTS_VL --data chats=CHATS \
        --presets 2b qwen3-vl-2b --capacity 16384

Datasets of one name hold the same rows, preprocessed for each family; each preset takes the one of its family. All ways
run in one process, one after the other:

- padded: batches padded to their longest sample, drawn at random, of the largest size that fits, found by trying, and
  of the half of it; the faster counts;
- padded, by length: the same with batches of samples of similar length, as with ``group_by_length`` of the `Trainer`;
- padded, Liger: the same with Liger's RMSNorm, SwiGLU and fused linear cross-entropy;
- packs: full packs of the same samples through ``vlmdata.integrations.transformers``, of --capacity tokens, the first
  that fits;
- packs, Liger: the same with Liger's kernels, applied in the same way;
- NeMo Automodel: its model on the same packs (`nemo_peer.py`), if it is installed;
- Unsloth: its model on padded batches (`unsloth_peer.py`), in a process without other ways;
- bundled trainer: its step on the same packs, without multi-token prediction, with the first of --capacity and
  --recompute that fits. Its gradients and optimizer state are fp32.

Both sides train on about as many tokens, --tokens. Everything else is that of `train_peer.py`: bf16, fused AdamW,
clipped gradients, inputs on the device before the clock starts, true tokens, steps after a warm-up. Triton has few
configurations of the delta net's kernels to choose from, for all ways. Writes adapter-peer-<label>-<date>.json and .md
under --out, and with --profile the kernels of a step on packs, and where its host waits for the device.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib
import importlib.util
import itertools
import json
import shlex
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nemo_peer import NemoStep, nemo_model
from train_peer import (
    CLIP,
    DEVICE,
    DTYPE,
    STARTED,
    PeerStep,
    configs_of,
    emptied,
    figures,
    largest_batch,
    of_samples,
    peer_of,
    report,
    time_batches,
    time_ours,
    timed,
)
from unsloth_peer import unsloth_model

from vlmdata import PackedBatch, StreamingLoader, VlmDataset, open_dataset
from vlmdata.integrations.steps import step_loss, step_weight
from vlmdata.integrations.transformers import packed, token_losses
from vlmdata.model.architecture import Architecture
from vlmdata.model.families import preset, spec_of

WAYS = ("padded", "padded, Liger", "packs", "packs, Liger", "NeMo Automodel", "bundled trainer", "Unsloth")
#: Shares of the largest padded batch that are tried.
SHARES = (1.0, 0.5)


def with_liger(model: torch.nn.Module) -> torch.nn.Module:
    """Exchanges parts of a model for Liger's, in place."""
    from liger_kernel.transformers import monkey_patch

    apply = getattr(monkey_patch, f"apply_liger_kernel_to_{model.config.model_type}")  # type: ignore[union-attr]
    apply(model=model, rope=False, fused_linear_cross_entropy=True)
    return model


class PackStep(PeerStep):
    """An optimizer step of one pack, as the page of transformers' models shows it."""

    def __init__(self, model: torch.nn.Module):
        super().__init__(packed(model).model)

    def inputs(self, batch: PackedBatch) -> PackedBatch:
        """What a step takes: the batch itself."""
        return batch

    def __call__(self, batch: Any) -> float:
        """Trains on a pack and returns its mean loss."""
        loss = step_loss(token_losses(self.model, batch), batch, step_weight([batch]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


def time_padded(
    model: torch.nn.Module, architecture: Architecture, dataset: VlmDataset, options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Figures of padded batches of the fastest size, at random and by length; smaller ones if others do not fit."""
    step = PeerStep(model)
    count = largest_batch(step, dataset, options)
    found: dict[str, dict[str, Any]] = {}
    for name, by_length in (("", False), (", by length", True)):
        tried: dict[int, float] = {}
        for share in SHARES:
            size = max(1, int(count * share))
            while size and size not in tried:
                emptied()
                try:
                    timing = time_batches(
                        step, architecture, dataset, size, steps_of(dataset, size, options), by_length
                    )
                except torch.OutOfMemoryError:
                    step.optimizer.zero_grad(set_to_none=True)
                    size -= 1
                    continue
                tried[size] = timing["tokens_per_second"]
                if tried[size] == max(tried.values()):
                    found[name] = timing | {"tried": tried, "largest": count}
    return found or {"": {"batch": 0}}


def steps_of(dataset: VlmDataset, count: int, options: argparse.Namespace) -> argparse.Namespace:
    """The options, with as many steps as --tokens are batches of so many samples."""
    steps = round(options.tokens / (count * float(np.mean(dataset.index.lengths))))
    return argparse.Namespace(**vars(options) | {"steps": max(3, steps)})


def time_packs(
    step: PackStep | NemoStep, architecture: Architecture, dataset: VlmDataset, options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Figures of full packs, of the first capacity that fits."""
    flops = spec_of(architecture).step_flops(architecture, False, ())
    for capacity in options.capacity:
        emptied()
        with StreamingLoader(dataset.directory, capacity=capacity, global_batch=1, num_workers=0) as loader:
            # The epoch's last pack may be nearly empty, which says nothing where the dataset is small.
            full = [batch.clone().to(DEVICE) for batch in loader if batch.true_tokens > 0.9 * capacity]
        if not full:
            continue
        steps = max(3, round(options.tokens / capacity))
        batches = list(itertools.islice(itertools.cycle(full), steps))
        counts = [of_samples(dataset, [origin.index for origin in batch.origins], flops) for batch in batches]
        retries = allocator_retries()
        inputs = [step.inputs(batch) for batch in batches]
        try:
            seconds, losses = timed(step, inputs, options)
        except torch.OutOfMemoryError:
            step.optimizer.zero_grad(set_to_none=True)
            continue
        slots = sum(batch.total_tokens for batch in batches)
        found = figures(seconds, counts, slots, losses) | {"batch": f"packs of {capacity:,}"}
        found["allocator_retries"] = allocator_retries() - retries
        if options.profile:
            found["waits"] = write_waits(step, inputs[0], options)
            write_profile(step, inputs[0], options)
        return {"": found}
    return {"": {"batch": 0}}


def time_trainer(name: str, dataset: VlmDataset, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Figures of the bundled trainer's step on full packs, of the first capacity that fits."""
    from vlmdata.model.training.build import architecture_of

    for capacity in options.capacity:
        steps = max(3, round(options.tokens / capacity))
        chosen = argparse.Namespace(**vars(options) | {"capacity": capacity, "steps": steps})
        configs = configs_of(name, dataset, chosen)
        found = time_ours(architecture_of(configs[0]), configs, dataset, chosen)
        if found["batch"]:
            return {"": found | {"batch": f"packs of {capacity:,}"}}
    return {"": {"batch": 0}}


def write_profile(step: PackStep | NemoStep, batch: Any, options: argparse.Namespace) -> None:
    """Writes the kernels of a step, the longest first."""
    with torch.profiler.profile() as profile:
        step(batch)
        torch.cuda.synchronize()
    for order in ("self_cuda_time_total", "self_cpu_time_total"):
        table = profile.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=90)
        path = options.out / f"profile-{options.label}-{order}.txt"
        path.write_text("\n".join(line[:91] + line[-140:] for line in table.splitlines()))


def allocator_retries() -> int:
    """How often memory was full and the allocator gave its unused blocks back, which waits for the device."""
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0)) if DEVICE.type == "cuda" else 0


def write_waits(step: PackStep | NemoStep, batch: Any, options: argparse.Namespace) -> int:
    """Writes where the host waits for the device in a step, and returns how often."""
    places: list[str] = []

    def note(message: Any, *args: Any, **kwargs: Any) -> None:
        if "synchroniz" in str(message):
            frames = traceback.extract_stack()[:-1][-8:]
            places.append(" < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames)))

    with waits_as_warnings(), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        step(batch)
    (options.out / f"waits-{options.label}.txt").write_text("\n".join(places) + "\n")
    return len(places)


@contextmanager
def waits_as_warnings() -> Iterator[None]:
    """Makes torch warn at each wait for the device."""
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        if DEVICE.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def dataset_for(name: str, kind: str, options: argparse.Namespace) -> VlmDataset | None:
    """The dataset of a name that is for a preset's family."""
    found = [open_dataset(path) for label, path in options.data if label == kind]
    return next((each for each in found if each.manifest.model_family.name == preset(name).data_family), None)


def measure(way: str, name: str, dataset: VlmDataset, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Figures of a way of a preset, by what is added to its name."""
    if way == "bundled trainer":
        return time_trainer(name, dataset, options)
    tokenizer, architecture = dataset.manifest.tokenizer, preset(name)
    if architecture.language.vocab_size < tokenizer.vocab_size or DEVICE.type == "cpu":
        architecture = architecture.with_vocabulary(tokenizer)
    architecture = dataclasses.replace(architecture, image_token_id=tokenizer.image)
    emptied()
    if way == "NeMo Automodel":
        return time_packs(NemoStep(nemo_model(architecture)), architecture, dataset, options)
    model = unsloth_model(architecture) if way == "Unsloth" else peer_of(architecture, checkpointing=False)
    if "Liger" in way:
        with_liger(model)
    if way.startswith("padded") or way == "Unsloth":
        return time_padded(model, architecture, dataset, options)
    return time_packs(PackStep(model), architecture, dataset, options)


def few_configurations() -> None:
    """Restricts Triton's choice for the delta net, as the bundled trainer does."""
    if DEVICE.type == "cuda" and importlib.util.find_spec("fla") is not None:
        from vlmdata.model.kernels.configurations import choose_configurations

        choose_configurations(128, 128, torch.cuda.get_device_capability(DEVICE))


def labelled(text: str) -> tuple[str, Path]:
    """Splits NAME=FOLDER."""
    name, _, path = text.rpartition("=")
    return name or "data", Path(path)


def main() -> None:
    """Measures all ways and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=labelled, action="append", required=True, help="NAME=FOLDER; repeatable")
    parser.add_argument("--presets", nargs="+", default=["2b", "qwen3-vl-2b"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS[:-1]), help="Unsloth by itself alone")
    parser.add_argument(
        "--capacity", type=int, nargs="+", default=[16384], help="tokens of a pack, the first that fits"
    )
    parser.add_argument("--start", type=int, default=8, help="the batch with which the search for the largest begins")
    parser.add_argument("--largest", type=int, default=64, help="the largest batch to try")
    parser.add_argument("--tokens", type=int, default=49152, help="about how many tokens are timed")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="write the kernels of a step on packs")
    parser.add_argument("--recompute", nargs="+", default=["none"], help="what the bundled trainer computes again")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which no way begins")
    parser.add_argument("--label", default="", help="of the result files")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    options = parser.parse_args()
    if "Unsloth" in options.ways and len(options.ways) > 1:
        parser.error("--ways Unsloth goes alone: it changes transformers for all that follows")
    from vlmdata.model.parallel.environment import before_megatron

    before_megatron()
    if "Unsloth" in options.ways:
        importlib.import_module("unsloth")  # after torch's cuDNN, before transformers

    import transformers

    from vlmdata.model.parallel import groups
    from vlmdata.model.parallel.cpu_mode import cpu_mode_if_needed

    groups.initialize()
    few_configurations()
    about: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "benchmarks/adapter_peer.py", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name(DEVICE) if DEVICE.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "note": f"{DTYPE}, random weights.",
        "presets": {},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    label = options.label
    stem = options.out / "-".join(filter(None, ["adapter-peer", label, about["date"]]))
    kinds = list(dict.fromkeys(kind for kind, _ in options.data))
    with cpu_mode_if_needed():
        for name, kind, way in itertools.product(options.presets, kinds, options.ways):
            if (dataset := dataset_for(name, kind, options)) is None:
                continue
            ways = about["presets"].setdefault(f"{name}, {kind}", {})
            if time.monotonic() - STARTED > options.limit:
                print(f"  {name} {kind} {way}: left out, --limit has passed", flush=True)
                continue
            begun = time.monotonic()
            options.label = "-".join(filter(None, [label, name, kind]))
            for more, timing in measure(way, name, dataset, options).items():
                ways[way + more] = timing | {"way_seconds": time.monotonic() - begun}
                print(f"  {name} {kind} {way}{more}: {json.dumps(ways[way + more])}", flush=True)
            stem.with_suffix(".json").write_text(json.dumps(about, indent=2) + "\n")
            stem.with_suffix(".md").write_text(
                report(about, "transformers' model on packs, beside padded batches", WAYS[1])
            )
    groups.destroy()
    print(stem.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
