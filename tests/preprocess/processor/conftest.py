"""Rows with none, one and two images, and what a processor's dataset of them is."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.preprocess.processor.tiny import save_tiny


@pytest.fixture(scope="package")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven conversations of one or two exchanges with up to two images, as JSON lines."""
    folder, random, lines = tmp_path_factory.mktemp("rows"), np.random.default_rng(3), []
    for number in range(7):
        parts: list[dict[str, Any]] = []
        for image in range(number % 3):
            name = f"{number}_{image}.png"
            pixels = random.integers(0, 256, (60 + 17 * number, 90 + 31 * image, 3), dtype=np.uint8)
            (folder / name).write_bytes(png(pixels))
            parts += [{"type": "image", "image": name}, {"type": "text", "text": f"No. {image}. "}]
        talk = [
            {"role": "user", "content": [*parts, {"type": "text", "text": f"What is {number}?"}]},
            {"role": "assistant", "content": f"It is {number}, as you see."},
        ]
        if number % 2:
            talk += [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Quite sure."}]
        lines.append(json.dumps({"messages": talk}))
    file = folder / "rows.jsonl"
    file.write_text("\n".join(lines))
    return file


def png(pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    """The file of an image."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns the folder of a tiny model by its type, made on first use."""
    folder, made = tmp_path_factory.mktemp("models"), dict[str, Path]()

    def model(name: str) -> Path:
        if name not in made:
            made[name] = save_tiny(name, folder / name)
        return made[name]

    return model
