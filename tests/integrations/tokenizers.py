"""A tokenizer of made-up words with the ids of the synthetic dataset, for trainers that want one."""

from __future__ import annotations

from pathlib import Path

from tests.loader.synthetic import IMAGE_TOKEN, PAD

#: Texts of the ids that trainers look for by name.
WORDS = {
    IMAGE_TOKEN: "<|image_pad|>",
    PAD: "<|endoftext|>",
    3: "<|vision_pad|>",
    4: "<|vision_start|>",
    5: "<|vision_end|>",
    6: "<|im_end|>",
    2: "<|video_pad|>",
    1: "<|im_start|>",
}


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer that transformers can load. No test encodes anything with it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {WORDS.get(number, f"w{number}"): number for number in range(1002)}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")),
        unk_token="w0",
        eos_token=WORDS[6],
        pad_token=WORDS[PAD],
        additional_special_tokens=list(WORDS.values()),
    ).save_pretrained(folder)
