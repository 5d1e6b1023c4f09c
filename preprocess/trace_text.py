"""A traced row in the terminal: what the recipe got and made, the tokens with targets marked, or the traceback."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from preprocess.chat.tokenizer import ChatTokenizer
from preprocess.conversation import Conversation, ImagePart, Message
from preprocess.encode import EncodedImage, EncodedSample
from preprocess.reject import RowRejected
from preprocess.trace import TracedCandidate, TracedRow
from vlmdata.format.schema import PATCH_SIZE, PATCHES_PER_TOKEN, sample_key
from vlmdata.inspect.terminal.draw import data, facts
from vlmdata.inspect.text import visible

_VALUE, _PART = 100, 200  # characters shown of a column's value, of a text part
_TARGET = "bold green"


def print_trace(console: Console, traced: TracedRow, recipe: str, tokenizer: ChatTokenizer) -> None:
    """Prints a traced row.

    Args:
        console: Where to.
        traced: The row.
        recipe: Name of the recipe.
        tokenizer: Spells the tokens.
    """
    console.print(Text(f"source row {traced.number:,} of {traced.rows:,}", "bold"))
    if traced.row is not None:
        console.print(facts(*((str(name), data(_shown(value)), "") for name, value in traced.row.values.items())))
    console.print()
    if traced.error is not None:
        _print_error(console, traced.error, "the row is rejected" if traced.row is None else f"recipe {recipe}")
        return
    made = len(traced.candidates)
    listed = traced.candidates[0].candidate.sample is not None
    console.print(Text(f"recipe {recipe} returned " + (f"a list of {made}" if listed else "one sample"), "bold"))
    for each in traced.candidates:
        console.print()
        _print_candidate(console, each, traced.number, tokenizer)


def _print_candidate(console: Console, traced: TracedCandidate, row: int, tokenizer: ChatTokenizer) -> None:
    candidate, outcome = traced.candidate, traced.outcome
    console.print(Text(f"sample {sample_key(row, candidate.sample, candidate.of)}", "bold"))
    encoded = outcome if isinstance(outcome, EncodedSample) else None
    if isinstance(candidate.made, Conversation):
        console.print(facts(*_parts(candidate.made, encoded.images if encoded else ())))
    if encoded is None:
        assert isinstance(outcome, Exception)
        refused = isinstance(candidate.made, RowRejected)
        _print_error(console, outcome, "the recipe refuses it" if refused else "encoding it")
        return
    tokens = encoded.length - sum(_tokens(image) for image in encoded.images)
    cut = ", the last answer is cut" if encoded.truncated else ""
    turns = f"in {encoded.target_turns} turn" + "s" * (encoded.target_turns != 1)
    console.print(
        facts(
            ("tokens", f"{encoded.length:,}", f"{tokens:,} of text, {encoded.length - tokens:,} of images{cut}"),
            ("targets", f"{int(encoded.loss_mask.sum()):,}", turns),
        )
    )
    console.print(Text("⟦targets⟧", _TARGET) + Text(" are what the loss is taken over; ↵ is a newline", "dim"))
    console.print(_marked(encoded, tokenizer))


def _parts(made: Conversation, images: tuple[EncodedImage, ...]) -> Iterator[tuple[str, Any, str]]:
    """A line for every part of every turn."""
    remaining = iter(images)
    if made.loss_weight != 1:
        yield "weight", f"{made.loss_weight}", "of the sample"
    if made.tools:
        yield "tools", f"{len(made.tools)}", ""
    for message in made.messages:
        name: str = message.role
        for value, remark in _content(message, remaining):
            yield name, value, remark
            name = ""
    if made.unused:
        yield "unused keys", data(", ".join(made.unused)), "harmless"
    if made.unknown:
        yield "unused keys", data(", ".join(made.unknown)), "unknown to the recipe"


def _content(message: Message, images: Iterator[EncodedImage]) -> Iterator[tuple[Any, str]]:
    weight = "" if message.loss_weight is None else f"weight {message.loss_weight}"
    if message.reasoning is not None:
        yield data(message.reasoning, "italic", limit=_PART), "reasoning"
    for part in message.parts:
        if isinstance(part, ImagePart):
            yield data(f"image {part.field}"), _sizes(part, next(images, None))
        else:
            yield data(part.text, limit=_PART), weight
    for call in message.tool_calls:
        yield data(dict(call), limit=_PART), "tool call"
    if not (message.parts or message.reasoning is not None or message.tool_calls):
        yield Text("nothing", "dim"), weight


def _sizes(part: ImagePart, image: EncodedImage | None) -> str:
    file = f"{len(part.data):,} bytes"
    if image is None:
        return file
    _, height, width = (PATCH_SIZE * side for side in image.grid)
    origin = image.origin
    found = f"{origin['format']} of {origin['width']} × {origin['height']}"
    return f"{file}, {found}, stored as {width} × {height}: {_tokens(image):,} tokens"


def _tokens(image: EncodedImage) -> int:
    t, h, w = image.grid
    return t * h * w // PATCHES_PER_TOKEN


def _marked(encoded: EncodedSample, tokenizer: ChatTokenizer) -> Text:
    """The tokens as text, targets between brackets, image tokens folded."""
    text, image = Text(), tokenizer.info.image
    ids, mask = (values[: encoded.length].tolist() for values in (encoded.input_ids, encoded.loss_mask))
    for (target, is_image), group in groupby(zip(ids, mask, strict=True), lambda each: (each[1] > 0, each[0] == image)):
        run = [token for token, _ in group]
        if is_image:
            text.append(f"{tokenizer.image_text} × {len(run):,}", "blue")
            continue
        spelled = visible(tokenizer.hf.decode(run, clean_up_tokenization_spaces=False)).replace("\n", "↵\n")
        text.append(f"⟦{spelled}⟧" if target else spelled, _TARGET if target else "")
    return text


def _print_error(console: Console, error: Exception, doing: str) -> None:
    if isinstance(error, RowRejected):
        console.print(
            facts(("rejected", data(error.reason.value, "yellow"), doing), ("because", data(error.message), ""))
        )
        return
    console.print(Text(f"{doing} failed:", "bold red"))
    console.print(Text(visible("".join(traceback.format_exception(error))).rstrip()), soft_wrap=True)


def _shown(value: Any) -> str:
    """A column's value in short; bytes by their number."""
    short = repr(_without_bytes(value))
    return short if len(short) <= _VALUE else f"{short[:_VALUE]}… ({len(short):,} characters)"


def _without_bytes(value: Any) -> Any:
    if isinstance(value, bytes):
        return _Size(len(value))
    if isinstance(value, Mapping):
        return {key: _without_bytes(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_bytes(item) for item in value]
    return value


class _Size(int):
    """A number of bytes that shows itself as such."""

    def __repr__(self) -> str:
        return f"<{int(self):,} bytes>"
