"""Unsloth's Qwen3.5-VL and Qwen3-VL for `adapter_peer.py`: full fine-tuning on padded batches, with its kernels.

Needs unsloth, unsloth_zoo and what they import. Unsloth changes transformers when it is imported, so this way gets a
process of its own: `--ways Unsloth`. It loads models from a folder, which is made here with random weights; it compiles
its own modules into a folder `unsloth_compiled_cache` of the working directory. It tries causal-conv1d in float16, and
leaves it out if that fails. Not measured yet: its models loaded on a CPU that passed for a GPU, and took no step there.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from train_peer import DTYPE, emptied, peer_of

from vlmdata.model.architecture import Architecture
from vlmdata.preprocess.assets import EMBEDDED_TOKENIZER

LONGEST = 16384  # tokens; sizes nothing, as positions are computed


def unsloth_model(architecture: Architecture) -> torch.nn.Module:
    """Unsloth's model of an architecture with random weights, all of them trained, without checkpointing."""
    from unsloth import FastVisionModel

    settings: dict[str, Any] = {"use_gradient_checkpointing": False}
    with tempfile.TemporaryDirectory() as folder:
        save(peer_of(architecture, checkpointing=False), Path(folder))
        emptied()
        model, _ = FastVisionModel.from_pretrained(
            folder,
            dtype=DTYPE,
            max_seq_length=LONGEST,
            load_in_4bit=False,
            full_finetuning=True,
            local_files_only=True,
            **settings,
        )
    trained: torch.nn.Module = FastVisionModel.for_training(model, **settings)
    return trained


def save(model: Any, folder: Path) -> None:
    """Writes a model with a processor, which Unsloth loads too; the benchmark makes its batches without it."""
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2VLImageProcessor,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    model.config.dtype = DTYPE
    model.save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(EMBEDDED_TOKENIZER)
    template = tokenizer.chat_template
    Qwen3VLProcessor(
        Qwen2VLImageProcessor(), tokenizer, Qwen3VLVideoProcessor(), chat_template=template
    ).save_pretrained(folder)
