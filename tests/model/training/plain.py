"""A tiny Hugging Face checkpoint for a dataset, and what transformers computes of its samples one by one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.model.helpers import transformers_model, weights_of
from vlmdata.families.chat import IMAGE, VIDEO
from vlmdata.families.qwen3_5 import FAMILY
from vlmdata.format.dataset import VlmDataset
from vlmdata.format.schema import Sample
from vlmdata.model.families import architecture_to_hf


def write_checkpoint(folder: Path, data: Path, preset: str = "tiny", weights: bool = True, mtp: bool = True) -> Any:
    """As :func:`write_hf_folder`, and returns transformers' model of it."""
    return transformers_model(*write_hf_folder(folder, data, preset, weights, mtp))


def write_hf_folder(
    folder: Path, data: Path, preset: str = "tiny", weights: bool = True, mtp: bool = True
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Writes a checkpoint whose vocabulary is the dataset's.

    Args:
        folder: Where to.
        data: The dataset.
        preset: Size.
        weights: Whether there are weights beside the ``config.json``.
        mtp: Whether multi-token prediction is among them.

    Returns:
        Its architecture and weights.
    """
    from safetensors.torch import save_file

    from vlmdata.model.families import preset as preset_of

    tokenizer = VlmDataset(data).manifest.tokenizer
    architecture = preset_of(preset).with_vocabulary(tokenizer, tokenizer.vocab_size)
    made = weights_of(architecture, mtp=mtp)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(architecture_to_hf(architecture)))
    if weights:
        save_file(made, folder / "model.safetensors")
    return architecture, made


@torch.no_grad()
def plain_loss(model: Any, data: Path, samples: Iterable[int] | None = None) -> tuple[float, int]:
    """Weighted mean of losses over the targets of samples (all if None), each by itself, and the number of targets."""
    dataset, total, weight, targets = VlmDataset(data), 0.0, 0.0, 0
    for number in range(len(dataset)) if samples is None else samples:
        losses, weights = plain_losses(model, dataset[number])
        total, weight = total + float((losses * weights).sum()), weight + float(weights.sum())
        targets += int((weights > 0).sum())
    return total / weight, targets


def plain_losses(model: Any, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy of each label of a sample by itself, and its weight; float32 (length - 1,), 0 off target."""
    ids = torch.from_numpy(sample.input_ids[1 : sample.length].astype("int64"))
    labels = torch.where(torch.from_numpy(sample.loss_mask[1 : sample.length] != 0), ids, -100)
    weights = sample.loss_mask if sample.loss_weights is None else sample.loss_weights
    losses = torch.nn.functional.cross_entropy(plain_logits(model, sample)[:-1], labels, reduction="none")
    return losses, torch.from_numpy(weights[1 : sample.length].astype("float32"))


def plain_logits(model: Any, sample: Sample) -> torch.Tensor:
    """Logits of a sample by itself, float32 (L, vocabulary)."""
    inputs: dict[str, Any] = {
        "input_ids": torch.from_numpy(sample.input_ids[None, : sample.length].astype("int64")),
        "position_ids": torch.from_numpy(sample.position_ids[:, None, : sample.length].astype("int64")),
    }
    ends = np.cumsum([item.rows for item in sample.items])
    values: dict[str, list[torch.Tensor]] = {IMAGE: [], VIDEO: []}
    for item, end in zip(sample.items, ends.tolist(), strict=True):
        rows = torch.from_numpy(sample.patches[end - item.rows : end].copy())
        values[item.kind].append(FAMILY.pixel_values(rows, torch.float32, copies=item.copies))
    for kind, name, grids in (
        (IMAGE, "pixel_values", sample.image_grid_thw),
        (VIDEO, "pixel_values_videos", sample.video_grid_thw),
    ):
        if grids is not None and len(grids):
            inputs[name] = torch.cat(values[kind])
            inputs[f"{kind}_grid_thw"] = torch.from_numpy(grids.astype("int64"))
    logits: torch.Tensor = model(use_cache=False, **inputs).logits
    return logits[0].float()
