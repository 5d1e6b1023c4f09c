"""transformers' own model, padded with Liger's kernels as users train it, beside the same model on packs.

    python benchmarks/adapter_peer.py --data RECEIPTS --data RECEIPTS_VL --presets 2b qwen3-vl-2b --capacity 16384

The datasets hold the same rows, preprocessed for each family; each preset takes the one of its family. All ways run in
one process, one after the other:

- padded: batches padded to their longest sample, drawn at random, as large as fit, found by trying;
- padded, Liger: the same with Liger's RMSNorm, SwiGLU and fused linear cross-entropy;
- packs: full packs of the same samples through ``vlmdata.integrations.transformers``, of --capacity tokens, halved
  until they fit;
- packs, Liger: the same with Liger's RMSNorm and SwiGLU. The adapter computes the loss itself.

Everything else is that of `train_peer.py`: bf16, fused AdamW, clipped gradients, inputs on the device before the clock
starts, true tokens, steps after a warm-up. Writes adapter-peer-<label>-<date>.json and .md under --out.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from train_peer import (
    CLIP,
    DEVICE,
    DTYPE,
    STARTED,
    PeerStep,
    emptied,
    figures,
    largest_batch,
    of_samples,
    peer_of,
    report,
    time_batches,
    timed,
)

from model.architecture import Architecture
from model.families import preset, spec_of
from vlmdata import StreamingLoader, VlmDataset, open_dataset
from vlmdata.integrations.steps import step_loss, step_weight
from vlmdata.integrations.transformers import packed, token_losses

WAYS = ("padded", "padded, Liger", "packs", "packs, Liger")


def with_liger(model: torch.nn.Module, fused_loss: bool) -> torch.nn.Module:
    """Exchanges parts of a model for Liger's, in place."""
    from liger_kernel.transformers import monkey_patch

    apply = getattr(monkey_patch, f"apply_liger_kernel_to_{model.config.model_type}")  # type: ignore[union-attr]
    apply(model=model, rope=False, fused_linear_cross_entropy=fused_loss)
    return model


class PackStep(PeerStep):
    """An optimizer step of one pack, as the page of transformers' models shows it."""

    def __init__(self, model: torch.nn.Module):
        super().__init__(packed(model).model)

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
) -> dict[str, Any]:
    """Figures of padded batches as large as fit; smaller ones if batches of other lengths do not."""
    step = PeerStep(model)
    count = largest_batch(step, dataset, options)
    while count:
        emptied()
        try:
            return time_batches(step, architecture, dataset, count, options)
        except torch.OutOfMemoryError:
            step.optimizer.zero_grad(set_to_none=True)
            count -= 1
    return {"batch": 0}


def time_packs(
    model: torch.nn.Module, architecture: Architecture, dataset: VlmDataset, options: argparse.Namespace
) -> dict[str, Any]:
    """Figures of full packs, of the largest capacity that fits."""
    step, flops = PackStep(model), spec_of(architecture).step_flops(architecture, False, ())
    capacity = options.capacity
    while capacity >= options.capacity // 8:
        emptied()
        with StreamingLoader(dataset.directory, capacity=capacity, global_batch=1, num_workers=0) as loader:
            # The epoch's last pack may be nearly empty, which says nothing where the dataset is small.
            full = (batch for batch in loader if batch.true_tokens > 0.9 * capacity)
            batches = [batch.clone().to(DEVICE) for batch in itertools.islice(full, options.steps)]
        counts = [of_samples(dataset, [origin.index for origin in batch.origins], flops) for batch in batches]
        try:
            seconds, losses = timed(step, batches, options)
        except torch.OutOfMemoryError:
            step.optimizer.zero_grad(set_to_none=True)
            capacity //= 2
            continue
        slots = sum(batch.total_tokens for batch in batches)
        return figures(seconds, counts, slots, losses) | {"batch": f"packs of {capacity:,}"}
    return {"batch": 0}


def measure(way: str, name: str, datasets: list[VlmDataset], options: argparse.Namespace) -> dict[str, Any]:
    """Figures of a way of a preset."""
    wanted = preset(name).data_family
    (dataset,) = [each for each in datasets if each.manifest.model_family.name == wanted]
    tokenizer, architecture = dataset.manifest.tokenizer, preset(name)
    if architecture.language.vocab_size < tokenizer.vocab_size or DEVICE.type == "cpu":
        architecture = architecture.with_vocabulary(tokenizer)
    architecture = dataclasses.replace(architecture, image_token_id=tokenizer.image)
    emptied()
    model = peer_of(architecture, checkpointing=False)
    if "Liger" in way:
        with_liger(model, fused_loss=way.startswith("padded"))
    timing: Callable[..., dict[str, Any]] = time_padded if way.startswith("padded") else time_packs
    return timing(model, architecture, dataset, options)


def main() -> None:
    """Measures all ways and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, action="append", required=True, help="a dataset; repeat for each family")
    parser.add_argument("--presets", nargs="+", default=["2b", "qwen3-vl-2b"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--capacity", type=int, default=16384, help="tokens of a pack")
    parser.add_argument("--start", type=int, default=8, help="the batch with which the search for the largest begins")
    parser.add_argument("--largest", type=int, default=64, help="the largest batch to try")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which no way begins")
    parser.add_argument("--label", default="", help="of the result files")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    options = parser.parse_args()
    import transformers

    datasets = [open_dataset(path) for path in options.data]
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
    stem = options.out / "-".join(filter(None, ["adapter-peer", options.label, about["date"]]))
    for name in options.presets:
        ways = about["presets"][name] = {}
        for way in options.ways:
            if time.monotonic() - STARTED > options.limit:
                print(f"  {name} {way}: left out, --limit has passed", flush=True)
                continue
            ways[way] = measure(way, name, datasets, options)
            print(f"  {name} {way}: {json.dumps(ways[way])}", flush=True)
            stem.with_suffix(".json").write_text(json.dumps(about, indent=2) + "\n")
            stem.with_suffix(".md").write_text(
                report(about, "transformers' model on packs, beside padded batches", WAYS[1])
            )
    print(stem.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
