"""Builds the embedded tokenizer: a small byte-level BPE with Qwen3.5's pre-tokenizer and special tokens.

    python -m tools.embedded_tokenizer.build [--out DIRECTORY]

It serves tests, the demo and trials; a real run uses the model's tokenizer. A rebuild with the pinned `tokenizers` is
byte-identical, which a test checks. The chat template is written by hand and stored with the built files; a build
elsewhere copies it. Building needs a checkout.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers.models import BPE

from tools.embedded_tokenizer.corpus import corpus
from vlmdata.preprocess.assets import EMBEDDED_TOKENIZER

# 6,144 in total with the 26 added tokens: an embedding table of that size splits evenly over the usual ranks.
VOCABULARY_SIZE = 6_118
MODEL_MAX_LENGTH = 262_144

# The pattern of transformers' Qwen3_5Tokenizer. Letters include one leading non-letter; digits are separate.
PRETOKENIZE_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# In Qwen's order, with ids after the vocabulary. skip_special_tokens drops the special tokens, not the markup.
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
MARKUP_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)

_CHAT_TEMPLATE = "chat_template.jinja"


def train() -> Tokenizer:
    """Trains the merges and appends the added tokens."""
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    # Offsets include the space of a token, so that adjacent tokens cover a text without gaps.
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        min_frequency=2,
        show_progress=False,
        # Sorted, because `alphabet()` has hash table order.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    if tokenizer.get_vocab_size() != VOCABULARY_SIZE:
        raise ValueError(
            f"the corpus gave {tokenizer.get_vocab_size()} entries of {VOCABULARY_SIZE}: it has too few pairs"
        )
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP_TOKENS])
    return tokenizer


def tokenizer_config() -> dict[str, Any]:
    """Returns the tokenizer config of transformers."""
    return {
        # This name and `additional_special_tokens` are from transformers 4; version 5 and other readers support them.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MODEL_MAX_LENGTH,
        "padding_side": "right",
        "clean_up_tokenization_spaces": False,
        "bos_token": None,
        "unk_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": list(SPECIAL_TOKENS),
        # Attributes that vision-language processors read.
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
    }


def build(directory: Path) -> None:
    """Writes the tokenizer's files to a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(train().to_str() + "\n", encoding="utf-8", newline="\n")
    config = json.dumps(tokenizer_config(), indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(config + "\n", encoding="utf-8", newline="\n")
    if directory.resolve() != EMBEDDED_TOKENIZER.resolve():
        shutil.copyfile(EMBEDDED_TOKENIZER / _CHAT_TEMPLATE, directory / _CHAT_TEMPLATE)


def main() -> None:
    """Builds from the command line."""
    parser = argparse.ArgumentParser(description="Build the embedded tokenizer.")
    parser.add_argument("--out", type=Path, default=EMBEDDED_TOKENIZER, help="where to write (default: the package)")
    build(parser.parse_args().out)


if __name__ == "__main__":
    main()
