"""Chats whose turns weigh differently in the loss: a recipe that takes weights from two keys of each row."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

from tests.chat_rows import write_jsonl
from vlmdata.preprocess.config import ImageConfig, PreprocessConfig
from vlmdata.preprocess.conversation import Conversation
from vlmdata.preprocess.recipes.base import load_recipe
from vlmdata.preprocess.recipes.media import MediaLoader
from vlmdata.preprocess.row import Row
from vlmdata.preprocess.run.dataset import preprocess_dataset
from vlmdata.preprocess.sources.open import open_source

RECIPE = "tests.weighted:WeightedChat"


class WeightedChat:
    """The chat recipe, with ``of_sample`` (a number) and ``of_turns`` (one number or null per assistant turn)."""

    def __init__(self, media: MediaLoader):
        self._chat = load_recipe("chat", media=media)

    def __call__(self, row: Row) -> Conversation:
        """The row's conversation with its weights."""
        values = dict(row.values)
        of_sample, of_turns = values.pop("of_sample", 1.0), values.pop("of_turns", None)
        conversation = self._chat(Row(row.number, values))
        messages = list(conversation.messages)
        answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
        for i, weight in zip(answers, of_turns or [None] * len(answers), strict=True):
            messages[i] = dataclasses.replace(messages[i], loss_weight=weight)
        return dataclasses.replace(conversation, messages=tuple(messages), loss_weight=of_sample)


def with_weights(rows: list[dict[str, Any]], seed: int = 0) -> list[dict[str, Any]]:
    """The rows, most of them with weights: of the sample, of turns, some 0; every fifth row has none."""
    weighted = []
    for number, row in enumerate(rows):
        draw = random.Random(f"{seed}:{number}")
        answers = sum(message["role"] == "assistant" for message in row["messages"])
        extra: dict[str, Any] = {}
        if number % 5:
            of_turns = [draw.choice([None, 0.25, 1.0, 1.7, 3.0]) for _ in range(answers)]
            if answers > 1 and draw.random() < 0.5:
                of_turns[draw.randrange(answers)] = 0
            extra = {"of_sample": draw.choice([1.0, 0.3, 2.0]), "of_turns": of_turns}
        weighted.append({**row, **extra})
    return weighted


def build_weighted(folder: Path, rows: list[dict[str, Any]], **config: Any) -> Path:
    """Preprocesses rows with weights into a folder below ``folder`` and returns it."""
    config.setdefault("image", ImageConfig(min_pixels=1024, max_pixels=16384))
    source = open_source(str(write_jsonl(folder / "rows.jsonl", rows)), recipe="chat")
    preprocess_dataset(source, folder / "dataset", PreprocessConfig(recipe=RECIPE, **config))
    return folder / "dataset"
