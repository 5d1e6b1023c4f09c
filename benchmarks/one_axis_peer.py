"""Gemma 4 and InternVL3.5 of published sizes, with random weights: packs beside padded batches in transformers.

    python benchmarks/one_axis_peer.py --presets gemma4-e2b internvl3.5-2b --capacity 16384 --checkpointing
    python benchmarks/one_axis_peer.py --presets gemma4-tiny internvl-tiny --capacity 2048 --tokens 4096    on a CPU

Samples are random: text with none to three images (of up to 256 tokens in Gemma, tiles of 256 in InternVL). Both ways
train on them in bfloat16 (float32 on a CPU), with AdamW, clipped gradients, and inputs on the device before the clock
starts:

- padded: batches padded to their longest sample, of the fastest size up to the largest that fits, with the loss of
  transformers' forward; samples at random, and by length;
- packs: full packs through ``vlmdata.integrations.transformers``.

Tokens are true tokens. Writes one-axis-peer-<label>-<date>.json and .md under --out, anew after each way.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from tests.loader.synthetic import IMAGE_TOKEN, PAD, write_dataset
from vlmdata import StreamingLoader, VlmDataset
from vlmdata.batch import IGNORE_INDEX
from vlmdata.integrations.steps import step_loss, step_weight
from vlmdata.integrations.transformers import packed, token_losses

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
LEARNING_RATE, CLIP = 1e-5, 1.0
WAYS = ("padded", "padded, by length", "packs")
#: Padded batches that are tried, until one does not fit.
SIZES = (1, 2, 4, 8, 16, 32)

_GEMMA_VISION = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "use_clipped_linears": True,
}
_LARGE_VISION = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 72,
    "standardize": True,
}
_GEMMA_LAYERS = ["sliding_attention"] * 5 + ["full_attention"]
#: Without the audio tower.
_E2B = {
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    "sliding_window": 512,
    "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 30.0,
}
_E4B = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 42,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "layer_types": _GEMMA_LAYERS * 7,
    "sliding_window": 512,
    "num_kv_shared_layers": 18,
    "final_logit_softcapping": 30.0,
}
#: The first 6 of 60 layers of the 31B, whose images see themselves.
_OF_31B = {
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "attention_k_eq_v": True,
    "layer_types": _GEMMA_LAYERS,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "use_bidirectional_attention": "vision",
}
_QWEN3_8B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "tie_word_embeddings": False,
}
_QWEN3_2B = _QWEN3_8B | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
_QWEN3_4B = _QWEN3_8B | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True}
_VIT_300M = {"attention_bias": True}
_SMALL = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
_SMALL_GEMMA = {
    **_SMALL,
    "layer_types": _GEMMA_LAYERS,
    "sliding_window": 64,
    "global_head_dim": 64,
    "hidden_size_per_layer_input": 0,
    "use_bidirectional_attention": "vision",
}
_SMALL_VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}

#: By preset: names of the classes, and text and vision configuration.
PRESETS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma4-tiny": ("Gemma4", _SMALL_GEMMA, _SMALL_VISION | {"num_key_value_heads": 2, "head_dim": 16}),
    "gemma4-e2b": ("Gemma4", _E2B, _GEMMA_VISION),
    "gemma4-e4b": ("Gemma4", _E4B, _GEMMA_VISION),
    "gemma4-31b-6-layers": ("Gemma4", _OF_31B, _LARGE_VISION),
    "internvl-tiny": ("InternVL", _SMALL | {"model_type": "qwen3"}, _SMALL_VISION),
    "internvl3.5-2b": ("InternVL", _QWEN3_2B, _VIT_300M),
    "internvl3.5-4b": ("InternVL", _QWEN3_4B, _VIT_300M),
    "internvl3.5-8b": ("InternVL", _QWEN3_8B, _VIT_300M),
}


def model_of(preset: str, checkpointing: bool) -> Any:
    """The model of a preset in training mode, on the device."""
    import transformers

    name, text, vision = PRESETS[preset]
    more = {"pad_token_id": PAD} if name == "Gemma4" else {}
    config = getattr(transformers, f"{name}Config")(
        text_config=text | more,
        vision_config=dict(vision),
        image_token_id=IMAGE_TOKEN,
        tie_word_embeddings=text.get("tie_word_embeddings", True),
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)
    try:
        with DEVICE:
            model = getattr(transformers, f"{name}ForConditionalGeneration")(config).train()
    finally:
        torch.set_default_dtype(before)
    if checkpointing:
        model.gradient_checkpointing_enable()
    return model


class Trainer:
    """Optimizer steps of a model, of one batch each.

    Args:
        model: The model.
        loss_of: Computes the loss of a batch with it.
    """

    def __init__(self, model: Any, loss_of: Callable[[Any, Any], torch.Tensor]):
        self.model, self._loss_of = model, loss_of
        self._optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=DEVICE.type == "cuda")

    def step(self, batch: Any) -> torch.Tensor:
        """Trains on a batch, and returns its loss."""
        loss = self._loss_of(self.model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def forget(self) -> None:
        """Frees what a step that did not fit has left."""
        self._optimizer.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()


def loss_of_pack(model: Any, batch: Any) -> torch.Tensor:
    """The mean loss of a pack."""
    return step_loss(token_losses(model, batch), batch, step_weight([batch]))


def loss_of_rows(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean loss of a padded batch, as transformers computes it."""
    loss: torch.Tensor = model(**inputs, use_cache=False).loss
    return loss


def padded(dataset: VlmDataset, numbers: list[int]) -> dict[str, torch.Tensor]:
    """Samples as rows, on the right padded to the longest, on the device."""
    samples, family = [dataset[number] for number in numbers], dataset.family
    shape = (len(samples), max(sample.length for sample in samples))
    ids, labels = np.full(shape, PAD, np.int64), np.full(shape, IGNORE_INDEX, np.int64)
    attention = np.zeros(shape, np.int64)
    for row, sample in enumerate(samples):
        n = sample.length
        ids[row, :n], attention[row, :n] = sample.input_ids[:n], 1
        labels[row, :n] = np.where(sample.loss_mask[:n] != 0, sample.input_ids[:n], IGNORE_INDEX)
    arrays = {"input_ids": ids, "attention_mask": attention, "labels": labels}
    if family.name == "gemma4":
        arrays["mm_token_type_ids"] = (ids == IMAGE_TOKEN).astype(np.int64)
    inputs = {name: torch.from_numpy(array).to(DEVICE) for name, array in arrays.items()}
    grids = np.concatenate([sample.image_grid_thw for sample in samples]).astype(np.int64)
    if len(grids):
        patches = torch.from_numpy(np.concatenate([sample.patches for sample in samples if len(sample.patches)]))
        dtype = None if family.name == "gemma4" else DTYPE  # Gemma computes with pixels before it casts them
        inputs |= family.image_inputs(family.pixel_values(patches.to(DEVICE), dtype), torch.from_numpy(grids))
    return inputs


def batches_of_rows(dataset: VlmDataset, size: int, by_length: bool, steps: int) -> Iterator[list[int]]:
    """Numbers of samples, drawn at random; ``by_length``: those of a batch are of similar length."""
    drawn = np.random.default_rng(0)
    order = drawn.permutation(len(dataset))
    if by_length:
        order = np.argsort(dataset.index.lengths, kind="stable")
    groups = [order[start : start + size].tolist() for start in range(0, len(order) - size + 1, size)]
    drawn.shuffle(groups)
    return itertools.islice(itertools.cycle(groups), steps)


def timed(trainer: Trainer, batches: list[Any], tokens: int, slots: int) -> dict[str, Any]:
    """Figures of steps on all batches, after a warm-up of two."""
    for batch in batches[:2]:
        trainer.step(batch)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    losses = torch.stack([trainer.step(batch) for batch in batches]).tolist()  # waits for the device
    seconds = time.perf_counter() - begun
    peak = torch.cuda.max_memory_allocated() / 2**30 if DEVICE.type == "cuda" else 0.0
    return {
        "tokens_per_second": tokens / seconds,
        "step_seconds": seconds / len(batches),
        "padding": 1 - tokens / slots,
        "peak_GiB": peak,
        "losses": [losses[0], losses[-1]],
    }


def time_rows(preset: str, dataset: VlmDataset, by_length: bool, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of the fastest size of padded batches."""
    trainer, found = Trainer(model_of(preset, options.checkpointing), loss_of_rows), {"tokens_per_second": 0.0}
    tried: dict[int, float] = {}
    for size in options.sizes:
        if size > len(dataset) // 2:
            break
        steps = max(2, round(options.tokens / (size * float(np.mean(dataset.index.lengths)))))
        numbers = list(batches_of_rows(dataset, size, by_length, steps))
        try:
            rows = [padded(dataset, each) for each in numbers]
            true = sum(int(dataset.index.lengths[each].sum()) for each in numbers)
            timing = timed(trainer, rows, true, sum(each["input_ids"].numel() for each in rows))
        except torch.OutOfMemoryError:
            trainer.forget()
            break
        tried[size] = timing["tokens_per_second"]
        if tried[size] > found["tokens_per_second"]:
            found = timing | {"batch": f"{size} rows"}
    return found | {"tried": tried}


def time_packs(preset: str, dataset: VlmDataset, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of full packs."""
    trainer = Trainer(packed(model_of(preset, options.checkpointing)).model, loss_of_pack)
    with StreamingLoader(dataset.directory, capacity=options.capacity, global_batch=1, num_workers=0) as loader:
        full = [batch.clone().to(DEVICE) for batch in loader if batch.true_tokens > 0.8 * options.capacity]
    steps = max(2, round(options.tokens / options.capacity))
    batches = list(itertools.islice(itertools.cycle(full), steps))
    true = sum(each.true_tokens for each in batches)
    try:
        timing = timed(trainer, batches, true, sum(each.total_tokens for each in batches))
    except torch.OutOfMemoryError:
        return {"tokens_per_second": 0.0}
    return timing | {"batch": f"packs of {options.capacity:,}"}


def report(about: dict[str, Any]) -> str:
    """The figures as a page."""
    head = ["model", "way", "batch", "tokens/s", "relative", "padding", "GiB"]
    lines = ["# Gemma 4 and InternVL3.5 on packs, beside padded batches", "", f"`{about['command']}`", ""]
    lines += [f"{about['device']}, {about['date']}, torch {about['torch']}, transformers {about['transformers']}.", ""]
    lines += ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for preset, ways in about["presets"].items():
        base = max((each["tokens_per_second"] for way, each in ways.items() if way != "packs"), default=0.0)
        for way, each in ways.items():
            speed = each["tokens_per_second"]
            relative = f"{speed / base:.2f}" if base else "-"
            cells = [preset, way, each.get("batch", "none fits"), f"{speed:,.0f}", relative]
            cells += [f"{each.get('padding', 0):.0%}", f"{each.get('peak_GiB', 0):.1f}"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures all presets and writes the tables."""
    import transformers

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", nargs="+", choices=PRESETS, required=True)
    parser.add_argument("--capacity", type=int, default=16384, help="tokens of a pack")
    parser.add_argument("--tokens", type=int, default=98304, help="about how many tokens are timed in each way")
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="padded batches to try, ascending")
    parser.add_argument("--checkpointing", action="store_true", help="compute activations again, in all ways")
    parser.add_argument("--label", default="", help="of the result files")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    options = parser.parse_args()
    about: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "benchmarks/one_axis_peer.py", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name(DEVICE) if DEVICE.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "presets": {},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / "-".join(filter(None, ["one-axis-peer", options.label, about["date"]]))  # may hold dots
    with tempfile.TemporaryDirectory() as folder:
        for preset in options.presets:
            family = PRESETS[preset][0].lower()
            if not (path := Path(folder) / family).exists():
                write_dataset(path, 1, options.samples, family=family, longest_text=600, largest_image=16)
            dataset, ways = VlmDataset(path), about["presets"].setdefault(preset, {})
            for way in WAYS:
                gc.collect()
                torch.cuda.empty_cache()
                if way == "packs":
                    ways[way] = time_packs(preset, dataset, options)
                else:
                    ways[way] = time_rows(preset, dataset, way != "padded", options)
                print(f"  {preset} {way}: {json.dumps(ways[way])}", flush=True)
                Path(f"{stem}.json").write_text(json.dumps(about, indent=2) + "\n")
                Path(f"{stem}.md").write_text(report(about))
    print(Path(f"{stem}.md").read_text())


if __name__ == "__main__":
    main()
