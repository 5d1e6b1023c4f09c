"""A plain DataLoader whose worker runs transformers' processor on the image files, in every step."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from shared import PREFETCH, batch_size, facts, main, measure
from torch.utils.data import DataLoader, Dataset
from transformers import AutoTokenizer, Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor


def prepare(data: Path, own: Path) -> None:
    """Nothing: it reads the images that ``run.py`` wrote."""


class Rows(Dataset[list[Any]]):
    """Conversations, with images as stored bytes in memory."""

    def __init__(self, data: Path):
        self.rows = [json.loads(line) for line in (data / "rows.jsonl").read_text().splitlines()]
        self.files = {path.name: path.read_bytes() for path in (data / "images").iterdir()}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> list[Any]:
        return [
            {"role": message["role"], "content": [self.part(part) for part in message["content"]]}
            for message in self.rows[number]
        ]

    def part(self, part: dict[str, str]) -> dict[str, Any]:
        if part["type"] == "text":
            return part
        return {"type": "image", "image": Image.open(io.BytesIO(self.files[part["file"]])).convert("RGB")}


class Process:
    """The collate function."""

    def __init__(self, data: Path):
        limits = facts(data)
        images = Qwen2VLImageProcessor(
            patch_size=16,
            image_mean=[0.5] * 3,
            image_std=[0.5] * 3,
            size={"shortest_edge": limits["min_pixels"], "longest_edge": limits["max_pixels"]},
        )
        tokenizer = AutoTokenizer.from_pretrained(data / "dataset" / "tokenizer")
        self.processor = Qwen3VLProcessor(
            images, tokenizer, Qwen3VLVideoProcessor(), chat_template=tokenizer.chat_template
        )

    def __call__(self, talks: list[Any]) -> dict[str, torch.Tensor]:
        made = self.processor.apply_chat_template(
            talks, tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs={"padding": True}
        )
        return {name: made[name] for name in ("input_ids", "attention_mask", "pixel_values", "image_grid_thw")}


def run(data: Path, own: Path, seconds: float) -> None:
    loader = DataLoader(
        Rows(data),
        batch_size=batch_size(data),
        shuffle=True,
        num_workers=1,
        prefetch_factor=PREFETCH,
        persistent_workers=True,
        drop_last=True,
        collate_fn=Process(data),
    )
    measure(lambda: loader, lambda batch: batch | {"patches": batch["pixel_values"]}, seconds)


if __name__ == "__main__":
    main(prepare, run)
