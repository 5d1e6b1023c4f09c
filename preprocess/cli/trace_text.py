"""Prints a traced row: the recipe's input and result, the tokens with marked targets, or the traceback."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from vlmdata.format.schema import sample_key
from vlmdata.inspect.terminal.draw import data, facts
from vlmdata.inspect.text import visible
from vlmdata.preprocess.chat.tokenizer import ChatTokenizer
from vlmdata.preprocess.conversation import ContentPart, Conversation, Document, ImagePart, Message, VideoPart
from vlmdata.preprocess.encode import EncodedSample, SampleItem
from vlmdata.preprocess.grounding import BoxPart, LabelPart, PointPart
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.run.trace import TracedCandidate, TracedRow
from vlmdata.wording import counted

_VALUE, _PART = 100, 200  # characters shown of a column's value, of a text part
_TARGET = "bold green"


def print_trace(console: Console, traced: TracedRow, recipe: str, tokenizer: ChatTokenizer) -> None:
    """Prints a traced row, its tokens decoded."""
    place = f" ({visible(traced.place)})" if traced.place else ""
    console.print(Text(f"source row {traced.number:,} of {traced.rows:,}{place}", "bold"))
    if traced.row is not None:
        columns = traced.row.values.items()
        console.print(facts(*((visible(str(name)), data(_shown(value)), "") for name, value in columns)))
    console.print()
    if traced.error is not None:
        _print_error(console, traced.error, "the row is rejected" if traced.row is None else f"recipe {recipe}")
        return
    made = len(traced.candidates)
    listed = traced.candidates[0].candidate.sample is not None
    console.print(
        Text(
            f"recipe {recipe} returned " + (f"a list of {made}{_with_variants(traced)}" if listed else "one sample"),
            "bold",
        )
    )
    total = sum(len(each.outcome) if isinstance(each.outcome, list) else 1 for each in traced.candidates)
    listed = listed or total > 1
    number = 0
    for each in traced.candidates:
        count = len(each.outcome) if isinstance(each.outcome, list) else 1
        keys = [sample_key(traced.number, n if listed else None, total) for n in range(number, number + count)]
        number += count
        console.print()
        _print_candidate(console, each, keys, tokenizer)


def _with_variants(traced: TracedRow) -> str:
    """Says how many of the candidates are variants (``--variants``); "" without any."""
    made = [each.candidate.made for each in traced.candidates]
    numbers = [each.variant.get("number") for each in made if isinstance(each, Conversation)]
    variants = sum(number not in (None, 0) for number in numbers)
    return f", {counted(variants, 'variant')} among them" if variants else ""


def _print_candidate(console: Console, traced: TracedCandidate, keys: list[str], tokenizer: ChatTokenizer) -> None:
    made, outcome = traced.candidate.made, traced.outcome
    console.print(Text("sample " + (keys[0] if len(keys) == 1 else f"{keys[0]} to {keys[-1]}"), "bold"))
    if not isinstance(made, RowRejected):
        samples = [each for each in outcome if isinstance(each, EncodedSample)] if isinstance(outcome, list) else []
        # Pieces of a document have different items, turns of a conversation the same.
        items = list(dict.fromkeys(item for sample in samples for item in sample.items if not item.view))
        console.print(facts(*_parts(made, items)))
    if isinstance(outcome, Exception):
        _print_error(console, outcome, "the recipe rejected it" if isinstance(made, RowRejected) else "encoding it")
        return
    piece = "turn" if isinstance(made, Conversation) else "piece"
    for key, encoded in zip(keys, outcome, strict=True):
        if len(keys) > 1:
            console.print()
            console.print(Text(f"{piece} {key}", "bold"))
        if isinstance(encoded, RowRejected):
            _print_error(console, encoded, f"this {piece}")
        else:
            _print_sample(console, encoded, tokenizer)


def _print_sample(console: Console, encoded: EncodedSample, tokenizer: ChatTokenizer) -> None:
    of_items = sum(item.tokens for item in encoded.items)
    what = "images and videos" if encoded.video_grid_thw is not None else "images"
    cut, dropped = ", truncated" if encoded.truncated else "", encoded.dropped_reasoning
    tokens = f"{encoded.length - of_items:,} of text, {of_items:,} of {what}{cut}"
    where = f"in {counted(encoded.target_turns, 'turn')}" if encoded.target_turns else "of a document"
    console.print(
        facts(
            ("tokens", f"{encoded.length:,}", tokens),
            ("targets", f"{int(encoded.loss_mask.sum()):,}", where),
            *([("dropped", f"{dropped:,}", "reasoning of so many turns, by the template")] if dropped else []),
        )
    )
    console.print(Text("⟦targets⟧", _TARGET) + Text(" are in the loss; ↵ is a newline", "dim"))
    console.print(_marked(encoded, tokenizer))


def _parts(made: Conversation | Document, items: list[SampleItem]) -> Iterator[tuple[str, Any, str]]:
    """Yields a line for each part of each turn, or of the document."""
    remaining = iter(items)
    if made.loss_weight != 1:
        yield "weight", f"{made.loss_weight}", "of the sample"
    if isinstance(made, Conversation) and made.variant:
        none = made.variant.get("none")
        yield "variant", "none" if none else f"{made.variant['number']}", f"{none or ''}"
    if made.shortened:
        yield "shortened", "", ", ".join(f"{name} {value:,}" for name, value in made.shortened.items())
    if isinstance(made, Document):
        for number, part in enumerate(made.parts):
            yield "" if number else "document", *_part(part, remaining, "")
    else:
        yield from _turns(made, remaining)
    for name, value in made.columns.items():
        yield "column", data(f"{name} = {value}", limit=_PART), ""
    for keys, remark in ((made.unused, "harmless"), (made.unknown, "unknown to the recipe")):
        if keys:
            yield "unused keys", data(", ".join(keys)), remark


def _turns(made: Conversation, items: Iterator[SampleItem]) -> Iterator[tuple[str, Any, str]]:
    if made.tools:
        yield "tools", f"{len(made.tools)}", ""
    for message in made.messages:
        name: str = message.role
        for value, remark in _content(message, items):
            yield name, value, remark
            name = ""


def _content(message: Message, items: Iterator[SampleItem]) -> Iterator[tuple[Any, str]]:
    weight = "" if message.loss_weight is None else f"weight {message.loss_weight}"
    if message.reasoning is not None:
        yield data(message.reasoning, "italic", limit=_PART), "reasoning"
    for part in message.parts:
        yield _part(part, items, weight)
    for call in message.tool_calls:
        yield data(dict(call), limit=_PART), "tool call"
    if not (message.parts or message.reasoning is not None or message.tool_calls):
        yield Text("nothing", "dim"), weight


def _part(part: ContentPart, items: Iterator[SampleItem], remark: str) -> tuple[Any, str]:
    if isinstance(part, ImagePart):
        return data(f"image {part.field}"), _sizes(part, next(items, None))
    if isinstance(part, VideoPart):
        return data(f"video {part.field}"), _frames(part, next(items, None))
    if isinstance(part, LabelPart):
        return data(f"label {part.label}", limit=_PART), remark
    if isinstance(part, BoxPart | PointPart):
        return data(f"{part.field} {list(part.coordinates)}"), f"{part.unit.value}, of image {part.image}"
    return data(part.text, limit=_PART), remark


def _sizes(part: ImagePart, image: SampleItem | None) -> str:
    file = counted(len(part.data), "byte")
    if image is None:
        return file
    height, width = image.size
    origin = image.origin
    found = f"{origin['format']} of {origin['width']} × {origin['height']}"
    return f"{file}, {found}, stored as {width} × {height}: {counted(image.tokens, 'token')}"


def _frames(part: VideoPart, video: SampleItem | None) -> str:
    file = counted(sum(map(len, [part.data] if isinstance(part.data, bytes) else part.data)), "byte")
    if video is None:
        return file
    height, width = video.size
    origin = video.origin
    found = f"{origin['format']} of {origin['width']} × {origin['height']}, {counted(origin['file_frames'], 'frame')}"
    first, last = origin["seconds"][0], origin["seconds"][-1]
    frames = f"{counted(len(origin['frames']), 'frame')} from {first:.2f} to {last:.2f} s"
    return f"{file}, {found}, stored as {frames} of {width} × {height}: {counted(video.tokens, 'token')}"


def _marked(encoded: EncodedSample, tokenizer: ChatTokenizer) -> Text:
    """Formats the tokens as text, with targets in brackets and placeholders folded."""
    text, placeholders = Text(), set(tokenizer.info.all_placeholders)
    ids, mask = (values[: encoded.length].tolist() for values in (encoded.input_ids, encoded.loss_mask))
    pairs = zip(ids, mask, strict=True)
    marked = groupby(pairs, lambda each: (each[1] > 0, each[0] if each[0] in placeholders else None))
    for (target, placeholder), group in marked:
        run = [token for token, _ in group]
        if placeholder is not None:
            text.append(f"{tokenizer.hf.convert_ids_to_tokens(placeholder)} × {len(run):,}", "blue")
            continue
        spelled = visible(tokenizer.hf.decode(run, clean_up_tokenization_spaces=False)).replace("\n", "↵\n")
        text.append(f"⟦{spelled}⟧" if target else spelled, _TARGET if target else "")
    return text


def _print_error(console: Console, error: Exception, doing: str) -> None:
    if isinstance(error, RowRejected):
        rejected = ("rejected", data(error.reason.value, "yellow"), doing)
        console.print(facts(rejected, ("because", data(error.message), "")))
        return
    console.print(Text(f"{doing} failed:", "bold red"))
    console.print(Text(visible("".join(traceback.format_exception(error))).rstrip()), soft_wrap=True)


def _shown(value: Any) -> str:
    """Formats a column's value, shortened; bytes as their number."""
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
    """A number of bytes with a readable representation."""

    def __repr__(self) -> str:
        return f"<{counted(self, 'byte')}>"
