"""One sample in the terminal: its text with targets marked, and its tokens as a table."""

from __future__ import annotations

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vlmdata.format.schema import parse_key
from vlmdata.inspect.boxes import BoxDescription
from vlmdata.inspect.findings import Finding
from vlmdata.inspect.frames import shown_frames
from vlmdata.inspect.sample import ImageDescription, SampleDescription, Span, SpanKind
from vlmdata.inspect.terminal.draw import SEVERITY, columns, data, facts
from vlmdata.inspect.text import visible

#: Number of temporal patches of a video that are listed.
_MOST_FRAMES = 16
#: Number of boxes and points that are listed.
_MOST_BOXES = 50
#: Number of image tokens shown at both ends of a run in the table.
_ENDS = 2
_ROLE_STYLES = {"system": "magenta", "user": "cyan", "tool": "yellow"}
_TARGET = "bold green"


def print_sample(console: Console, sample: SampleDescription, tokens: bool = False) -> None:
    """Prints a sample, with its token table if wanted."""
    console.print(_identity(sample))
    console.print()
    for found in sample.findings:
        console.print(finding_line(found), soft_wrap=True)
    if sample.findings:
        console.print()
    legend = Text("⟦targets⟧", _TARGET) + Text(" are in the loss; ↵ is a newline", "dim")
    if sample.tokens.weights is not None:
        legend += Text("; ×2 is a loss weight", "dim")
    console.print(legend)
    console.print(_text(sample), soft_wrap=False)
    if sample.images:
        console.print()
        console.print(_images(sample.images))
    if sample.boxes:
        console.print()
        console.print(_boxes(sample.boxes))
    for image in sample.images:
        if image.frames:
            console.print()
            console.print(_frames(image))
    if tokens:
        console.print()
        console.print(_tokens(sample))


def finding_line(found: Finding) -> Text:
    """Formats a finding on one line."""
    mark, style = SEVERITY[found.severity]
    return Text(f"{mark} {found.kind}: ", style) + data(found.message)


def _identity(sample: SampleDescription) -> Table:
    padding = sample.padded_length - sample.length
    turns = ", ".join(turn.role or "?" for turn in sample.turns)
    document = sample.target_turns == 0 and [turn.role for turn in sample.turns] == [""]
    cut = ", truncated" if document else ", answer truncated"
    return facts(
        ("sample", data(sample.key, "bold"), f"number {sample.index:,} of the dataset"),
        ("source row", f"{sample.source_row:,}{_within_row(sample.key)}", data(f"of {sample.source}")),
        ("stored", data(sample.shard), f"bytes {sample.offset:,} to {sample.offset + sample.size:,}"),
        ("tokens", f"{sample.length:,}", f"+ {padding:,} padding" + (cut if sample.truncated else "")),
        ("targets", f"{sample.num_targets:,}", f"{100 * sample.target_share:.1f} % of tokens" + _weights(sample)),
        ("turns", "none", "a document: all text is a target")
        if document
        else ("turns", data(turns, limit=80), f"{sample.target_turns} with targets"),
        *(("column", data(f"{name} = {value}", limit=200), "") for name, value in sample.columns.items()),
    )


def _within_row(key: str) -> str:
    """Describes the sample's place in its row's list, if there is one."""
    named = parse_key(key)
    return f", sample {named[1]}" if named is not None and named[1] >= 0 else ""


def _weights(sample: SampleDescription) -> str:
    if sample.tokens.weights is None:
        return ""
    weights = np.unique(sample.tokens.weights[sample.tokens.mask != 0])
    return f", weights {weights[0]:g}" + (f" to {weights[-1]:g}" if len(weights) > 1 else "")


def _text(sample: SampleDescription) -> Text:
    """Formats the whole text, with targets in brackets and image tokens folded."""
    text = Text()
    opened: Span | None = None
    for span in sample.spans:
        if opened is not None and (not span.target or span.weight != opened.weight):
            text.append("⟧", _TARGET)
            opened = None
        if opened is None and span.target:
            text.append("⟦", _TARGET)
            if span.weight is not None:
                text.append(f"×{span.weight:g} ", "dim")
            opened = span
        text.append(_shown(span), _style(span))
    if opened is not None:
        text.append("⟧", _TARGET)
    return text


def _shown(span: Span) -> str:
    if span.kind is SpanKind.IMAGE:
        count = span.stop - span.start
        return f"{visible(span.text)} × {count:,}" if count > 1 else visible(span.text)
    return visible(span.text).replace("\n", "↵\n")


def _style(span: Span) -> str:
    if span.target:
        return _TARGET + (" underline" if span.kind is not SpanKind.TEXT else "")
    if span.kind in (SpanKind.HEADER, SpanKind.SPECIAL):
        return "dim"
    return "blue" if span.kind is SpanKind.IMAGE else _ROLE_STYLES.get(span.role, "")


def _images(images: tuple[ImageDescription, ...]) -> Table:
    text = ("file", "normalised")
    names = ("image", "pixels", "patches", "tokens", "first token", "file", "scale", "normalised")
    table = columns("images", *names, left=text)
    for image in images:
        source = image.source
        form = source.get("codec") if image.frames else source.get("mode")
        file = f"{source.get('format')} {form or ''} {source.get('width')} × {source.get('height')}"
        steps = source.get("normalised") or []
        t, h, w = image.grid
        table.add_row(
            f"{image.number} (video)" if image.frames else str(image.number),
            f"{image.width} × {image.height}" + (f", tile {image.tile[0]}, {image.tile[1]}" if image.tile else ""),
            f"{h} × {w}" + (f" × {t}" if t > 1 else "") + f" = {image.patches:,}",
            f"{image.tokens:,}",
            f"{image.start:,}",
            data(file if source else "not recorded"),
            f"{image.scale:.2f}" if image.scale else "",
            data(", ".join(map(str, steps)) if isinstance(steps, list) else steps),
        )
    return table


def _boxes(boxes: tuple[BoxDescription, ...]) -> Table:
    """Lists boxes and points: what the text says, and where that is in the resized image."""
    names = ("box", "image", "label", "in the text", "pixels of the image", "tokens", "wrong")
    table = columns("boxes and points", *names, left=("label", "wrong"))
    for box in boxes[:_MOST_BOXES]:
        table.add_row(
            f"{box.number}",
            "not known" if box.image is None else f"{box.image}",
            data(box.label or "", limit=60),
            _numbers(box.written),
            "" if box.pixels is None else _numbers(box.pixels),
            f"{box.start:,} to {box.stop:,}",
            Text(box.fault, "yellow"),
        )
    if len(boxes) > _MOST_BOXES:
        table.add_row("…", "", f"{len(boxes) - _MOST_BOXES:,} more (--json has them)", "", "", "", "")
    return table


def _numbers(values: tuple[float, ...]) -> str:
    return ", ".join(f"{round(value, 1):g}" for value in values)


def _frames(video: ImageDescription) -> Table:
    """Lists the temporal patches of a video: where their tokens are, and when their frames are shown."""
    names = ("temporal patch", "first token", "tokens", "told", "frames at", "numbers in the file")
    counts = video.frame_counts
    kept = (
        "" if counts is None else f": {counts[0]:,} in the file, {counts[1]:,} kept, {counts[0] - counts[1]:,} dropped"
    )
    table = columns(f"frames of video {video.number}{kept}", *names, left=names[-2:])
    shown = shown_frames(len(video.frames), _MOST_FRAMES)
    for before, number in zip([-1, *shown], shown, strict=False):
        if number > before + 1:
            table.add_row("…", "", "", "", f"{number - before - 1:,} more (--json has them)", "")
        frame = video.frames[number]
        table.add_row(
            f"{frame.patch}",
            f"{frame.start:,}",
            f"{frame.tokens:,}",
            "" if frame.told is None else f"{frame.told:.2f} s",
            ", ".join(f"{each:.2f}" for each in frame.seconds) + (" s" if frame.seconds else "not recorded"),
            ", ".join(map(str, frame.source)),
        )
    return table


def _tokens(sample: SampleDescription) -> Table:
    tokens = sample.tokens
    weighted = ("weight",) if tokens.weights is not None else ()
    table = columns("tokens", "index", "id", "text", "label", "mask", *weighted, *tokens.positions, left=("text",))
    for span in sample.spans:
        numbers = list(range(span.start, span.stop))
        folded = len(numbers) - 2 * _ENDS if span.kind is SpanKind.IMAGE else 0
        if folded > 1:
            numbers[_ENDS:-_ENDS] = [-1]
        for i in numbers:
            if i < 0:
                table.add_row("…", "", Text(f"{folded:,} more image tokens (--json has them)", "dim"))
                continue
            label = int(tokens.labels[i])
            table.add_row(
                f"{i}",
                f"{tokens.ids[i]}",
                data(tokens.texts[i], _TARGET if tokens.mask[i] else ""),
                f"{label}" if label >= 0 else Text(f"{label}", "dim"),
                Text("1", _TARGET) if tokens.mask[i] else Text(f"{tokens.mask[i]}", "dim"),
                *([] if tokens.weights is None else [f"{tokens.weights[i]:g}"]),
                *(f"{axis[i]}" for axis in tokens.positions.values()),
            )
    return table
