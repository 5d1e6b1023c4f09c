"""The tiny model as a folder with tokenizer and processor, for trainers that load models themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.integrations.tokenizers import write_tokenizer


def save_model(model: Any, folder: Path) -> Path:
    """Writes a Qwen3.5 of ``tiny_models`` in float32. Its processor has made-up words."""
    from transformers import AutoTokenizer, Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    write_tokenizer(folder)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.chat_template = template
    Qwen3VLProcessor(
        Qwen2VLImageProcessor(), tokenizer, Qwen3VLVideoProcessor(), chat_template=template
    ).save_pretrained(folder)
    return folder
