"""A fast Hugging Face tokenizer with the facts about it that encoding needs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preprocess.assets import EMBEDDED_TOKENIZER
from preprocess.config import EMBEDDED
from vlmdata.errors import SourceError
from vlmdata.format.manifest import TokenizerInfo
from vlmdata.format.tokenizer_files import fingerprint_of

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
ASSISTANT_HEADER = "assistant\n"

#: Special tokens that data may hold as text: they mark up content (grounding boxes), not turns or media.
_CONTENT_MARKUP = ("object_ref", "box", "quad")


@dataclass(frozen=True, eq=False)
class ChatTokenizer:
    """A tokenizer, its special ids, and its chat template.

    Attributes:
        hf: The transformers tokenizer.
        info: Ids and fingerprints, as written to the manifest.
        reserved: Texts that make turns, media or the end of text: what data must not be able to forge.
        specials: Texts of all tokens flagged special, ``reserved`` among them.
    """

    hf: Any
    info: TokenizerInfo
    reserved: frozenset[str]
    specials: frozenset[str]

    @property
    def image_text(self) -> str:
        """Text of the image placeholder token."""
        return str(self.hf.convert_ids_to_tokens(self.info.image))

    def save(self, directory: Path) -> None:
        """Writes the tokenizer's files, for ``AutoTokenizer.from_pretrained(directory)``."""
        self.hf.save_pretrained(directory)


def load_tokenizer(name: str = EMBEDDED, revision: str | None = None) -> ChatTokenizer:
    """Loads a tokenizer by hub id or folder.

    Args:
        name: What ``AutoTokenizer.from_pretrained`` takes, or ``embedded``.
        revision: Hub branch, tag or commit.

    Raises:
        SourceError: If it cannot be loaded, is not a fast tokenizer, or lacks the ChatML or vision tokens.
    """
    from transformers import AutoTokenizer

    place = str(EMBEDDED_TOKENIZER) if name == EMBEDDED else name
    try:
        hf = AutoTokenizer.from_pretrained(place, revision=revision)
    except (OSError, ValueError, ImportError) as error:
        where = "the folder" if Path(name).exists() else "the hub (is the network reachable?)"
        raise SourceError(
            f"--tokenizer {name}: cannot load it from {where}: {_first_line(error)}\n"
            "Give a hub id such as Qwen/Qwen3.5-9B, a folder with tokenizer.json, or `embedded` (small, for trials)."
        ) from error
    if not getattr(hf, "is_fast", False):
        raise SourceError(f"--tokenizer {name}: a fast tokenizer (tokenizer.json) is needed for exact offsets")
    if not hf.chat_template:
        raise SourceError(f"--tokenizer {name}: it has no chat template; targets are found through the template")
    specials = frozenset(t.content for t in hf.added_tokens_decoder.values() if t.special)
    reserved = frozenset(s for s in specials if not any(mark in s for mark in _CONTENT_MARKUP))
    return ChatTokenizer(hf, _describe(hf, name), reserved, specials)


def _describe(hf: Any, name: str) -> TokenizerInfo:
    def special(text: str, attribute: str | None = None) -> int:
        text = (getattr(hf, attribute, None) if attribute else None) or text
        token = hf.convert_tokens_to_ids(text)
        if token is None or hf.convert_ids_to_tokens(token) != text:
            raise SourceError(f"--tokenizer {name}: it has no token {text}, so it is not a Qwen-VL chat tokenizer")
        return int(token)

    pad = hf.pad_token_id
    return TokenizerInfo(
        name=name,
        fingerprint=fingerprint_of(hf.backend_tokenizer),
        chat_template=hashlib.sha256(_template_text(hf).encode()).hexdigest(),
        vocab_size=len(hf),
        pad=int(pad if pad is not None else hf.eos_token_id),
        im_start=special(IM_START),
        im_end=special(IM_END),
        vision_start=special("<|vision_start|>", "vision_bos_token"),
        vision_end=special("<|vision_end|>", "vision_eos_token"),
        image=special("<|image_pad|>", "image_token"),
        video=special("<|video_pad|>", "video_token"),
        assistant_header=tuple(hf.encode(ASSISTANT_HEADER, add_special_tokens=False)),
        special_tokens=dict(hf.special_tokens_map),
    )


def _template_text(hf: Any) -> str:
    template = hf.chat_template
    return template if isinstance(template, str) else repr(sorted(template.items()))


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
