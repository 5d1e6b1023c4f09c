"""A fast Hugging Face tokenizer with the data that encoding needs."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from preprocess.assets import EMBEDDED_TOKENIZER
from preprocess.config import EMBEDDED
from vlmdata.errors import SourceError
from vlmdata.format.manifest import TokenizerInfo
from vlmdata.format.tokenizer_files import fingerprint_of

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
ASSISTANT_HEADER = "assistant\n"

#: Special tokens that data may contain as text: they mark up content (grounding boxes), not turns or media.
_CONTENT_MARKUP = ("object_ref", "box", "quad")


@dataclass(frozen=True, eq=False)
class ChatTokenizer:
    """A tokenizer, its special ids, and its chat template.

    Attributes:
        hf: The transformers tokenizer.
        info: Ids and fingerprints, as written to the manifest.
        reserved: Texts of turns, media and the end of text, which data must not be able to forge. Those that
            the code relies on are reserved even if the tokenizer does not flag them special.
        specials: Texts of all tokens flagged special, and ``reserved``.
    """

    hf: Any
    info: TokenizerInfo
    reserved: frozenset[str]
    specials: frozenset[str]

    @property
    def image_text(self) -> str:
        """Text of the image placeholder token."""
        return str(self.hf.convert_ids_to_tokens(self.info.image))

    @cached_property
    def reserved_ids(self) -> npt.NDArray[np.int64]:
        """Ids of ``reserved``, int64 (R,)."""
        return np.array(sorted(self.hf.convert_tokens_to_ids(list(self.reserved))), dtype=np.int64)

    @cached_property
    def plain_backend(self) -> Tokenizer:
        """A copy of the tokenizer that treats ``specials`` as ordinary text. Created on first use."""
        fields = json.loads(self.hf.backend_tokenizer.to_str())
        for token in fields["added_tokens"]:
            token["special"] = token["special"] or token["content"] in self.reserved
        plain = Tokenizer.from_str(json.dumps(fields))
        plain.encode_special_tokens = True
        return plain

    def save(self, directory: Path) -> None:
        """Writes the tokenizer's files, for ``AutoTokenizer.from_pretrained(directory)``."""
        self.hf.save_pretrained(directory)


def load_tokenizer(name: str = EMBEDDED, revision: str | None = None) -> ChatTokenizer:
    """Loads a tokenizer by hub id or folder.

    Args:
        name: Argument of ``AutoTokenizer.from_pretrained``, or ``embedded``.
        revision: Hub branch, tag or commit.

    Raises:
        SourceError: If the tokenizer cannot be loaded, is not fast, or lacks the ChatML or vision tokens.
    """
    try:
        hf = _loaded(name, revision)
    except (OSError, ValueError, ImportError) as error:
        raise SourceError(
            f"--tokenizer {name}: cannot load it{_why_not_loaded(name, error)}\n"
            "Give a hub id such as Qwen/Qwen3.5-9B, a folder with tokenizer.json, or `embedded` (small, for trials)."
        ) from error
    if not getattr(hf, "is_fast", False):
        raise SourceError(f"--tokenizer {name}: exact offsets need a fast tokenizer (tokenizer.json)")
    if not hf.chat_template:
        raise SourceError(f"--tokenizer {name}: it has no chat template, which is needed to find targets")
    # Disables truncation and padding settings of tokenizer.json, which would apply to every row.
    hf.backend_tokenizer.no_truncation()
    hf.backend_tokenizer.no_padding()
    info = _describe(hf, name)
    relied = _relied_tokens(hf, info)
    flagged = frozenset(token.content for token in hf.added_tokens_decoder.values() if token.special)
    reserved = relied | {text for text in flagged if not any(mark in text for mark in _CONTENT_MARKUP)}
    if short := sorted(text for text in reserved if len(text) < 2):
        raise SourceError(
            f"--tokenizer {name}: its special token {short[0]!r} is an ordinary character, which occurs in text; set "
            "another one in its tokenizer_config.json (pad_token: <|endoftext|>)"
        )
    return ChatTokenizer(hf, info, reserved, flagged | reserved)


def _loaded(name: str, revision: str | None) -> Any:
    if name == EMBEDDED:
        # The class that AutoTokenizer finds, without importing the models that it knows: that takes 0.7 s.
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(EMBEDDED_TOKENIZER)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name, revision=revision)


def _describe(hf: Any, name: str) -> TokenizerInfo:
    def special(text: str, attribute: str | None = None) -> int:
        text = (getattr(hf, attribute, None) if attribute else None) or text
        token = hf.convert_tokens_to_ids(text)
        if token is None or hf.convert_ids_to_tokens(token) != text:
            raise SourceError(f"--tokenizer {name}: it has no token {text}, so it is not a Qwen-VL chat tokenizer")
        return int(token)

    pad = hf.pad_token_id if hf.pad_token_id is not None else hf.eos_token_id
    if pad is None:
        raise SourceError(
            f"--tokenizer {name}: it has neither a pad token nor an end token to fill sequences with; set pad_token in "
            "its tokenizer_config.json"
        )
    return TokenizerInfo(
        name=name,
        fingerprint=fingerprint_of(hf.backend_tokenizer),
        chat_template=hashlib.sha256(_template_text(hf).encode()).hexdigest(),
        vocab_size=len(hf),
        pad=int(pad),
        im_start=special(IM_START),
        im_end=special(IM_END),
        vision_start=special("<|vision_start|>", "vision_bos_token"),
        vision_end=special("<|vision_end|>", "vision_eos_token"),
        image=special("<|image_pad|>", "image_token"),
        video=special("<|video_pad|>", "video_token"),
        assistant_header=_assistant_header(hf, name),
        special_tokens=dict(hf.special_tokens_map),
        end_of_text=_end_of_text(hf),
    )


def _assistant_header(hf: Any, name: str) -> tuple[int, ...]:
    # After the turn's start, as in a conversation: some tokenizers put a space before the first word of a text.
    text = IM_START + ASSISTANT_HEADER
    encoding = hf.backend_tokenizer.encode(text, add_special_tokens=False)
    if encoding.offsets[-1][1] != len(text):
        raise SourceError(
            f"--tokenizer {name}: it drops the newline at the end of {text!r}, so answers cannot be separated from "
            "headers; remove whitespace stripping (normalizer) from its tokenizer.json"
        )
    return tuple(encoding.ids[1:])


def _relied_tokens(hf: Any, info: TokenizerInfo) -> frozenset[str]:
    """Returns the texts of the tokens for turns, images and padding.

    Raises:
        SourceError: If one of them cannot be distinguished from text or from another one.
    """
    ids = {
        "the turn's start": info.im_start,
        "the turn's end": info.im_end,
        "the vision start": info.vision_start,
        "the vision end": info.vision_end,
        "the image placeholder": info.image,
        "the video placeholder": info.video,
    }
    shared = [(a, b) for a, b in combinations(ids, 2) if ids[a] == ids[b]]
    shared += [("padding", role) for role, id in ids.items() if id == info.pad and id != info.im_end]
    if shared:
        a, b = shared[0]
        token = hf.convert_ids_to_tokens(ids[b])
        raise SourceError(f"--tokenizer {info.name}: it uses {token} for both {a} and {b}; each needs its own token")
    for role, id in (*ids.items(), ("padding", info.pad)):
        token = hf.added_tokens_decoder.get(id)
        text = hf.convert_ids_to_tokens(id)
        if token is None:
            raise SourceError(
                f"--tokenizer {info.name}: {text!r}, its token for {role}, is an ordinary entry of the vocabulary, so "
                "text could spell it; make it an added token (pad_token in tokenizer_config.json may name another one)"
            )
        if token.lstrip or token.rstrip or token.single_word:
            raise SourceError(
                f"--tokenizer {info.name}: {text} is marked lstrip, rstrip or single_word, so it absorbs adjacent text "
                "or is not always found; set all three to false in its tokenizer.json"
            )
    return frozenset(hf.convert_ids_to_tokens([*ids.values(), info.pad]))


def _end_of_text(hf: Any) -> int:
    """Returns the token that ends documents: ``<|endoftext|>``, else the tokenizer's end token, else the end of turns.

    The token is flagged special, so that data cannot spell it.
    """
    special = {token.content: id for id, token in hf.added_tokens_decoder.items() if token.special}
    found = next((special[text] for text in (END_OF_TEXT, hf.eos_token) if text in special), None)
    return int(hf.convert_tokens_to_ids(IM_END) if found is None else found)


def _template_text(hf: Any) -> str:
    template = hf.chat_template
    return template if isinstance(template, str) else repr(sorted(template.items()))


def _why_not_loaded(name: str, error: BaseException) -> str:
    """Continues the sentence ``cannot load it``: transformers takes a path that does not exist for a hub id."""
    path = Path(name)
    if path.is_file():
        return ": it is a file, not a folder."
    if path.is_dir():
        has = (path / "tokenizer.json").exists()
        return f" from the folder: {_first_line(error) if has else 'it has no tokenizer.json.'}"
    if path.is_absolute() or name.startswith((".", "~")) or len(path.parts) > 2:
        return ": there is no such folder."
    return f" from the hub (is the network reachable?), and there is no such folder: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
