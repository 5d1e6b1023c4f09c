"""Decodes single token ids, and finds the turn of each token. Does not need transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from vlmdata.errors import DatasetFormatError
from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import TOKENIZER_DIR
from vlmdata.format.tokenizer_files import VOCABULARY_FILE, vocabulary_problem
from vlmdata.format.tokenizer_info import TokenizerInfo

_REMEDY = "Run the same `vlmdata preprocess` command again; it rewrites the tokenizer."
#: Offset of Python's surrogateescape for bytes that are not UTF-8.
_STRAY_BYTE = 0xDC00


class TokenTexts:
    """Decodes token ids with the tokenizer stored in a dataset.

    Raises:
        DatasetFormatError: If the dataset has no readable tokenizer, or its tokenizer has changed.
    """

    def __init__(self, directory: Path, manifest: Manifest):
        path = directory / TOKENIZER_DIR / VOCABULARY_FILE
        try:
            problem = vocabulary_problem(directory, manifest)
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise DatasetFormatError(f"{path}: cannot read the tokenizer: {error}. {_REMEDY}") from error
        if problem:
            raise DatasetFormatError(
                f"{path}: not the tokenizer that the dataset was made with ({problem}), so it would decode other "
                f"text. {_REMEDY}"
            )
        self._byte_level = '"ByteLevel"' in json.dumps(json.loads(self._tokenizer.to_str()).get("decoder"))
        self._added = {id: token.content for id, token in self._tokenizer.get_added_tokens_decoder().items()}
        flagged = (id for id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special)
        info = manifest.tokenizer
        self._special = frozenset((*flagged, info.turns.start, info.turns.end, *info.item_ids))
        self._bytes: dict[int, bytes] = {}

    def is_special(self, token: int) -> bool:
        """True if an id is a turn or vision token, or special in the tokenizer."""
        return token in self._special

    def bytes_of(self, token: int) -> bytes:
        """Returns the bytes of a token; ``<unknown id N>`` for an unknown id."""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._spell(token)
        return found

    def decode(self, ids: Sequence[int]) -> str:
        r"""Decodes tokens, including special tokens. Bytes that are not UTF-8 become ``\xff``."""
        return b"".join(map(self.bytes_of, ids)).decode("utf-8", "backslashreplace")

    def decode_each(self, ids: Sequence[int]) -> list[str]:
        """Decodes each token, so that the texts join to :meth:`decode` of all tokens.

        A character whose bytes span several tokens belongs to the first of them; the others get "".
        """
        parts = [self.bytes_of(token) for token in ids]
        # Bytes that are not UTF-8 become one surrogate each, so the bytes of every character can be counted.
        text = b"".join(parts).decode("utf-8", "surrogateescape")
        pieces = [""] * len(parts)
        ends = list(accumulate(map(len, parts)))
        position = number = 0
        for character in text:
            while position >= ends[number]:
                number += 1
            stray = ord(character) - _STRAY_BYTE
            if 0x80 <= stray <= 0xFF:
                pieces[number] += f"\\x{stray:02x}"
                position += 1
            else:
                pieces[number] += character
                position += len(character.encode())
        return pieces

    def _spell(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        text = self._tokenizer.id_to_token(token) if 0 <= token < 1 << 32 else None
        if text is None:
            return f"<unknown id {token}>".encode()
        if not self._byte_level:
            return str(self._tokenizer.decode([token], skip_special_tokens=False)).encode()
        table = _byte_of_character()
        return bytes(table[c] for c in text) if all(c in table for c in text) else text.encode()


@dataclass(frozen=True)
class TurnSpan:
    """One turn of a conversation, in tokens."""

    role: str  # role in the header, "assistant" for the assistant's; "" before the first turn
    start: int  # index of the token that begins it
    body: int  # first token after the header
    stop: int  # one past its last token
    targets: int  # number of targets


def find_turns(
    ids: npt.NDArray[np.integer], mask: npt.NDArray[np.integer], info: TokenizerInfo, texts: TokenTexts
) -> tuple[TurnSpan, ...]:
    """Finds the turns of a sample from the tokens that begin them. They cover it without gaps.

    Responses of tools within a turn of the assistant are turns of the tool.
    """
    starts = np.flatnonzero(ids == info.turns.start).tolist()
    bounds = [*starts, len(ids)]
    before = bounds[0] if starts else 0
    turns = [TurnSpan("", 0, 0, before, int(np.count_nonzero(mask[:before])))] if before else []
    for start, stop in pairwise(bounds):
        role, body = _header(ids[start:stop].tolist(), info, texts)
        said = info.turns.spoken(ids[start:stop], info.item_ids) if role == "assistant" else [(0, stop - start)]
        cuts = sorted({start, stop, *(start + cut for each in said for cut in each)})
        answers = {start + begin for begin, _ in said}
        for first, last in pairwise(cuts):
            header = body if first == start else 0
            speaker = role if first in answers else "tool"
            turns.append(TurnSpan(speaker, first, first + header, last, int(np.count_nonzero(mask[first:last]))))
    return tuple(turns) or (TurnSpan("", 0, 0, len(ids), int(np.count_nonzero(mask))),)


def _header(turn: list[int], info: TokenizerInfo, texts: TokenTexts) -> tuple[str, int]:
    """Returns role and length of a turn's header: the assistant's, or its start token through the first newline.

    The role ends before that newline, or before a special token (``user<|end_header_id|>``).
    """
    assistant = list(info.turns.assistant)
    own = [info.turns.start, *assistant]
    if turn[: len(own)] == own:
        return "assistant", len(own)
    role: str | None = None
    for count, token in enumerate(turn[1:12], start=2):
        if token == info.turns.end:
            break
        newline = b"\n" in texts.bytes_of(token)
        if role is None and (newline or texts.is_special(token)):
            role = texts.decode(turn[1 : count - (not newline)]).split("\n")[0]
            for size in range(len(assistant) - 1, 1, -1):  # the header may end with more than one token
                if turn[count - 1 : count - 1 + size] == assistant[-size:]:
                    return role, count - 1 + size
        if newline:
            return role or "", count
    return "", 1


@cache
def _byte_of_character() -> dict[str, int]:
    """Returns byte-level BPE's alphabet: printable bytes map to themselves, others to characters from 256.

    Source: ``bytes_to_unicode`` of GPT-2's encoder.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(moved)}
