"""A packed batch in the terminal: a bar of segments, a bar of context-parallel ranks, and tables."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vlmdata.inspect.batch import BatchDescription
from vlmdata.inspect.terminal.draw import add_row, bar, columns, data, facts, number
from vlmdata.wording import counted

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
#: Okabe and Ito's palette, distinguishable with any colour vision. Letters and digits repeat the information.
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999")
_MARGIN = 10
_SHOWN = 12


def print_batch(console: Console, batch: BatchDescription) -> None:
    """Prints a packed batch."""
    console.print(_facts(batch))
    console.print()
    width = max(20, min(console.width - _MARGIN, 120))
    console.print(Text("segments  ", "bold") + _segment_bar(batch, width))
    if batch.context_parallel > 1:
        console.print(Text("cp rank   ", "bold") + _rank_bar(batch, width))
    console.print()
    console.print(_segments(batch))
    console.print()
    console.print(Text("cu_seqlens         ", "bold") + Text(_numbers(batch.cu_seqlens)), soft_wrap=True)
    console.print(Text("cu_seqlens_padded  ", "bold") + Text(_numbers(batch.cu_seqlens_padded)), soft_wrap=True)
    if batch.context_parallel > 1:
        console.print()
        console.print(_ranks(batch))
    if batch.images:
        console.print()
        console.print(_images(batch))


def segment_letter(i: int) -> str:
    """Returns the mark of a segment in the bar and the table."""
    return _LETTERS[i % len(_LETTERS)]


def _facts(batch: BatchDescription) -> Table:
    place = f"epoch {batch.epoch}, step {batch.step}, micro-batch {batch.micro_batch}"
    name = "empty" if batch.pack < 0 else f"pack {batch.pack} of the epoch's plan"
    room = f"{batch.true_tokens / batch.capacity:.1%} of the capacity {batch.capacity:,}" if batch.capacity else ""
    samples = sum(1 for segment in batch.segments if segment.key)
    return facts(
        ("batch", "" if batch.number is None else f"{batch.number}", f"{place}; {name}"),
        ("samples", f"{samples:,}", f"longest segment {batch.max_seqlen:,}"),
        ("tokens", f"{batch.total_tokens:,}", f"{batch.true_tokens:,} true, {room}" if room else ""),
        ("padding", f"{batch.padding:,}", f"{batch.padding / max(batch.total_tokens, 1):.1%} of tokens"),
        ("targets", f"{batch.targets:,}", f"{batch.targets / max(batch.true_tokens, 1):.1%} of true tokens"),
        ("images", f"{len(batch.images):,}", counted(sum(image.patches for image in batch.images), "patch")),
        ("cost", f"{batch.cost * 2**20 / 1e12:,.1f} TFLOP", "estimated, forward and backward"),
    )


def _segment_bar(batch: BatchDescription, width: int) -> Text:
    text = Text()
    for cell in range(width):
        token = cell * batch.total_tokens // width
        i = next(n for n, segment in enumerate(batch.segments) if token < segment.stop)
        segment = batch.segments[i]
        if not segment.key or token >= segment.start + segment.length:
            text.append("·", "dim")
        else:
            text.append(segment_letter(i), PALETTE[i % len(PALETTE)])
    return text


def _rank_bar(batch: BatchDescription, width: int) -> Text:
    owners = sorted((start, stop, share.rank) for share in batch.ranks for start, stop in share.ranges)
    text, at = Text(), 0
    for cell in range(width):
        token = cell * batch.total_tokens // width
        while at + 1 < len(owners) and token >= owners[at][1]:
            at += 1
        rank = owners[at][2]
        text.append(_DIGITS[rank % len(_DIGITS)], PALETTE[rank % len(PALETTE)])
    return text


def _segments(batch: BatchDescription) -> Table:
    several = len({segment.dataset for segment in batch.segments if segment.key}) > 1
    names = ["", "key", "row", "tokens", "padding", "targets", "images", "patches", "cost", " "]
    if several:
        names.insert(1, "dataset")
    table = columns("segments", *names, left=("", "key", " "))
    for i, segment in enumerate(batch.segments):
        style = PALETTE[i % len(PALETTE)]
        add_row(
            table,
            Text(segment_letter(i), style) if segment.key else Text("·", "dim"),
            *([str(segment.dataset)] if several else []),
            data(segment.key) if segment.key else Text("padded tail", "dim"),
            segment.source_row if segment.key else "",
            *(segment.length, segment.padding, segment.targets, segment.images, segment.patches),
            number(segment.cost_share, "share"),
            Text(bar(segment.cost_share, 16), style),
        )
    return table


def _ranks(batch: BatchDescription) -> Table:
    names = ("rank", "tokens", "true", "targets", "images", "patches", "token ranges")
    table = columns("context-parallel ranks", *names, left=("token ranges",))
    for share in batch.ranks:
        ranges = ", ".join(f"{start}–{stop - 1}" for start, stop in share.ranges[:_SHOWN])
        if len(share.ranges) > _SHOWN:
            ranges += f", … {len(share.ranges) - _SHOWN} more (--json has them)"
        rank = Text(f"{share.rank}", PALETTE[share.rank % len(PALETTE)])
        counts = (share.tokens, share.true_tokens, share.targets, share.images, share.patches)
        add_row(table, rank, *counts, ranges)
    return table


def _images(batch: BatchDescription) -> Table:
    names = ["image", "segment", "first token", "tokens", "patches", "grid"]
    if batch.context_parallel > 1:
        names.append("encoded by rank")
    table = columns("images", *names)
    for i, image in enumerate(batch.images):
        t, h, w = image.grid
        grid = f"{h} × {w}" + (f" × {t}" if t > 1 else "")
        encoder = [", ".join(map(str, image.ranks))] if batch.context_parallel > 1 else []
        counts = (image.start, image.tokens, image.patches)
        add_row(table, str(i), segment_letter(image.segment), *counts, grid, *encoder)
    return table


def _numbers(values: tuple[int, ...]) -> str:
    if len(values) <= 2 * _SHOWN:
        return ", ".join(map(str, values))
    return (
        ", ".join(map(str, values[:_SHOWN]))
        + f", … {len(values) - 2 * _SHOWN} more …, "
        + ", ".join(map(str, values[-_SHOWN:]))
    )
