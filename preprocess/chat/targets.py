"""Tokenizes rendered text and finds the target tokens.

Turns are found by structure (the tokens of their start and end that the template wrote), and targets within them by
character offsets. Nothing is ever searched for by its tokens, so an answer repeated in the prompt is no problem.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from vlmdata.families.chat import ChatFormat
from vlmdata.preprocess.chat.render import Rendered
from vlmdata.preprocess.chat.tokenizer import ChatTokenizer
from vlmdata.preprocess.config import TrainThink
from vlmdata.preprocess.reject import RowRejected, excerpt
from vlmdata.reasons import Reason


@dataclass(frozen=True, eq=False)
class Tokens:
    """Token ids and their places in the rendered text."""

    ids: npt.NDArray[np.int64]  # int64 (L,)
    starts: npt.NDArray[np.int64]  # int64 (L,), first character of each token
    ends: npt.NDArray[np.int64]  # int64 (L,), one past its last character
    reserved: npt.NDArray[np.int64]  # int64 (R,), places of the reserved tokens, ascending

    @cached_property
    def _places(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for place, token in zip(self.reserved.tolist(), self.ids[self.reserved].tolist(), strict=True):
            found.setdefault(token, []).append(place)
        return found

    def places(self, token: int) -> list[int]:
        """Returns the places of a reserved token, ascending."""
        return self._places.get(token, [])

    def count(self, token: int, first: int, stop: int) -> int:
        """Returns how often a reserved token is in a range of places."""
        places = self.places(token)
        return bisect_left(places, stop) - bisect_left(places, first)


@dataclass(frozen=True)
class Turn:
    """What one assistant message became in the rendered text, in characters.

    It is a turn, or a part of one between the responses of tools.
    """

    body: int  # start of the text after the header, or after a response
    answer: int  # start of the text after the think block; equals ``body`` without one
    reasoning: bool  # whether the think block is not empty
    #: One past the turn's end, and the newline after it if that is a separate token; or past the token that begins a
    #: response.
    stop: int
    opened: bool = False  # whether the prompt of inference opens a think block that no argument of the template closes

    def target_start(self, train_think: TrainThink) -> int:
        """Returns the first target character."""
        spoken = self.reasoning or self.opened
        include = train_think is TrainThink.ALWAYS or (train_think is TrainThink.AUTO and spoken)
        return self.body if include else self.answer


@dataclass(frozen=True, eq=False)
class TargetSpans:
    """Token ranges of the targets."""

    weights: npt.NDArray[np.float32]  # float32 (L,), weight of each token in the loss; 0 off target
    last: tuple[int, int]  # token range ``[start, stop)`` of the last target turn, including its end token and newline
    turn_weights: tuple[float, ...]  # weight of each assistant turn

    @property
    def turns(self) -> int:
        """Number of target turns."""
        return sum(weight > 0 for weight in self.turn_weights)


def tokenize(tokenizer: ChatTokenizer, rendered: Rendered, cuts: Sequence[int] = ()) -> Tokens:
    """Encodes the rendered text exactly as a call of the tokenizer would.

    But spans that only look like reserved tokens are encoded as ordinary text, and no token extends over a cut.

    Args:
        tokenizer: The tokenizer.
        rendered: The text.
        cuts: Characters, besides its own, before and after which the text is encoded separately.
    """
    cuts = (*rendered.cuts, *cuts)
    if not rendered.plain_spans and not cuts:
        encoding = tokenizer.hf.backend_tokenizer.encode(rendered.text, add_special_tokens=False)
        return _tokens([(0, encoding)], tokenizer)
    return _tokens(list(_encode_pieces(tokenizer, rendered, cuts)), tokenizer)


def _encode_pieces(tokenizer: ChatTokenizer, rendered: Rendered, cuts: Sequence[int]) -> Iterator[tuple[int, Any]]:
    """Encodes the text around look-alikes normally, and each stretch with look-alikes without special tokens.

    A stretch runs from one true special token to the next: tokenizers split there anyway, so all other tokens
    are unchanged.
    """
    text, forged = rendered.text, dict(rendered.plain_spans)
    bounds, cursor = {0, len(text), *cuts}, 0
    while (found := _next_special(text, cursor, tokenizer.specials)) is not None:
        start, end = found
        if forged.get(start) != end:
            bounds |= {start, end}
        cursor = end
    for start, end in pairwise(sorted(bounds)):
        plain = any(start <= span < end for span in forged)
        backend = tokenizer.plain_backend if plain else tokenizer.hf.backend_tokenizer
        yield start, backend.encode(text[start:end], add_special_tokens=False)


def _next_special(text: str, cursor: int, specials: frozenset[str]) -> tuple[int, int] | None:
    hits = [(at, -len(token)) for token in specials if (at := text.find(token, cursor)) >= 0]
    if not hits:
        return None
    start, negative_length = min(hits)
    return start, start - negative_length


def _tokens(pieces: list[tuple[int, Any]], tokenizer: ChatTokenizer) -> Tokens:
    ids = np.concatenate([np.asarray(encoding.ids, dtype=np.int64) for _, encoding in pieces])
    # From one iterator: numpy takes longer to read a list of pairs. Starts and ends are searched often, so each is one
    # piece of memory.
    offsets = [np.fromiter(chain.from_iterable(encoding.offsets), np.int64) + start for start, encoding in pieces]
    starts, ends = np.ascontiguousarray(np.concatenate(offsets).reshape(-1, 2).T)
    return Tokens(ids, starts, ends, np.flatnonzero(tokenizer.is_reserved[ids]))


def find_turns(text: str, tokens: Tokens, tokenizer: ChatTokenizer, remedy: str = "") -> list[Turn]:
    """Finds the assistant turns of a rendered conversation; :func:`tokenize` gave look-alikes in data other ids.

    Args:
        text: The rendered text.
        tokens: Its tokens.
        tokenizer: The tokenizer.
        remedy: What ends the message if there are no such turns.

    Raises:
        RowRejected: TEMPLATE_ERROR if the text is not a sequence of turns of the family.
    """
    chat, marks = tokenizer.family.chat, tokenizer.info.turns
    starts, ends = tokens.places(marks.start), tokens.places(marks.end)
    opening, turns = chat.turn_start + chat.assistant_header, list[Turn]()
    bounds = list(pairwise([*starts, len(tokens.ids)]))
    counts = [tokens.count(marks.end, first, stop) for first, stop in bounds]
    open_ended = [tokens.ids[stop - 1] in marks.response for _, stop in bounds]
    if (
        not starts
        or sum(counts) != len(ends)
        or any(count != 1 and not (count == 0 and unended) for count, unended in zip(counts, open_ended, strict=True))
    ):
        raise RowRejected(
            Reason.TEMPLATE_ERROR,
            f"the chat template wrote {len(starts)} {chat.turn_start} and {len(ends)} {chat.turn_end}; "
            f"turns must have the form {chat.turn_start}role … {chat.turn_end}{remedy}",
        )
    for first, stop in bounds:
        if not text.startswith(opening, at := int(tokens.starts[first])):
            continue
        for begin, end in marks.spoken(tokens.ids[first:stop], tokenizer.info.item_ids):
            body = int(tokens.starts[first + begin]) if begin else at + len(opening)
            turns.append(_said(text, tokens, range(first + begin, first + end), body, tokenizer))
    return turns


def _said(text: str, tokens: Tokens, said: range, body: int, tokenizer: ChatTokenizer) -> Turn:
    """Returns the turn of tokens that the assistant says, which its text after the header begins at ``body``."""
    chat, marks = tokenizer.family.chat, tokenizer.info.turns
    ends = tokens.places(marks.end)
    at = bisect_left(ends, said.start)
    ended = at < len(ends) and ends[at] < said.stop
    token = ends[at] if ended else said.stop - 1
    # Only a token that is just the newline: a longer one ("\n\n") belongs to the template, between turns.
    newline = ended and tuple(tokens.ids[token + 1 : token + 2].tolist()) in {marks.assistant[-1:]} - {()}
    return _turn(text, body, int(tokens.starts[token]), int(tokens.ends[token + newline]), chat)


def _turn(text: str, body: int, end: int, stop: int, chat: ChatFormat) -> Turn:
    """Returns a turn, with the think block that begins it, in any spacing."""
    content, (opening, closing) = text[body:end], chat.think or ("", "")
    begun = content.lstrip()
    if not opening or not begun.startswith(opening.strip()):
        return Turn(body, body, False, stop)
    begin = len(content) - len(begun) + len(opening.strip())
    at = content.find(closing.strip(), begin)
    if at < 0:
        return Turn(body, body, True, stop)
    after = at + len(closing.strip())
    # The marks' own whitespace belongs to the block, as in the prompt of inference; in another spacing, line ends do.
    own, rest = closing[len(closing.rstrip()) :], content[after:]
    space = rest[: len(rest) - len(rest.lstrip())]
    skipped = len(own) if rest.startswith(own) else space.rfind("\n") + 1
    return Turn(body, body + after + skipped, bool(content[begin:at].strip()), stop)


def token_over(tokens: Tokens, at: int) -> int | None:
    """Returns the token that begins before character ``at`` and ends after it, if there is one."""
    before = int(np.searchsorted(tokens.starts, at, side="left")) - 1
    return before if before >= 0 and tokens.ends[before] > at else None


def target_spans(
    tokens: Tokens, turns: list[Turn], turn_weights: tuple[float, ...], train_think: TrainThink, text: str
) -> TargetSpans:
    """Returns the loss weights of the target tokens.

    Raises:
        RowRejected: TEMPLATE_ERROR if a target would start inside a token (the template then merges header and answer,
            and at inference the prompt would be tokenized differently).
    """
    weights = np.zeros(len(tokens.ids), dtype=np.float32)
    last = (0, 0)
    for turn, weight in zip(turns, turn_weights, strict=True):
        if not weight:
            continue
        begin = turn.target_start(train_think)
        first = int(np.searchsorted(tokens.starts, begin, side="left"))
        stop = int(np.searchsorted(tokens.starts, turn.stop, side="left"))
        if (over := token_over(tokens, begin)) is not None:
            raise RowRejected(
                Reason.TEMPLATE_ERROR,
                f"the answer {excerpt(text[begin : turn.stop], 40)!r} starts inside the token "
                f"{text[tokens.starts[over] : tokens.ends[over]]!r} of the turn's header",
            )
        weights[first:stop] = weight
        last = (first, stop)
    if len(tokens.ids) == last[1] + 1 and text[tokens.starts[-1] :].isspace():
        last = last[0], last[1] + 1  # "\n\n" after the last turn: the turn still ends the sample
    return TargetSpans(weights, last, turn_weights)
