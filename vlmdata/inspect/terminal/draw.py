"""Shared helpers of the terminal views: numbers, bars, and safe text from data."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from vlmdata.inspect.findings import Severity
from vlmdata.inspect.histogram import Histogram
from vlmdata.inspect.text import one_line

_BAR_WIDTH = 32
_EIGHTHS = " ▏▎▍▌▋▊▉█"

#: A mark and a style, so that severity never depends on colour alone.
SEVERITY = {Severity.FAULT: ("✖", "bold red"), Severity.WARNING: ("▲", "yellow"), Severity.NOTE: ("·", "dim")}


def data(value: object, style: str = "", limit: int | None = None) -> Text:
    """Formats text from a dataset: one line, control characters escaped, never markup."""
    return Text(one_line(str(value), limit), style=style)


def number(value: float, kind: str = "integer") -> str:
    """Formats a value: 1,234 or 12.3 % or 0.56."""
    if kind == "share":
        return f"{100 * value:.1f} %"
    return f"{value:,.0f}" if kind == "integer" else f"{value:.2f}"


def bar(share: float, width: int = _BAR_WIDTH) -> str:
    """Draws a bar of block characters, visible for any share above 0."""
    eighths = round(max(0.0, min(share, 1.0)) * width * 8)
    if share > 0:
        eighths = max(eighths, 1)
    full, rest = divmod(eighths, 8)
    return "█" * full + (_EIGHTHS[rest] if rest else "")


def facts(*rows: tuple[str, Any, Any]) -> Table:
    """Builds a table of name, value and remark without a header."""
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(style="dim", overflow="fold")
    for name, value, remark in rows:
        table.add_row(name, *(each if isinstance(each, Text) else Text(str(each)) for each in (value, remark)))
    return table


def columns(title: str, *names: str, left: tuple[str, ...] = ()) -> Table:
    """Builds a table with named columns. Columns in ``left`` are left-aligned, others right-aligned."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.title, table.title_justify, table.title_style = title or None, "left", "bold"
    for name in names:
        table.add_column(name, justify="left" if name in left else "right", header_style="dim", overflow="fold")
    return table


def add_row(table: Table, *cells: str | Text | int) -> None:
    """Adds a row; whole numbers become 1,234."""
    table.add_row(*(f"{cell:,}" if isinstance(cell, int) else cell for cell in cells))


def histogram_table(histogram: Histogram) -> Table:
    """Draws a histogram as rows of range, count and bar, with mean and percentiles below."""
    growing = ", bins grow" if histogram.scale == "log" else ""
    table = Table(
        title=histogram.title + growing, title_justify="left", title_style="bold", show_header=False, box=None
    )
    table.pad_edge = False
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="cyan", no_wrap=True)
    most = max(histogram.counts)
    for low, high, count in zip(histogram.edges, histogram.edges[1:], histogram.counts, strict=False):
        table.add_row(bin_label(low, high, histogram.kind), f"{count:,}", bar(count / most))
    shown = {p: number(value, histogram.kind) for p, value in histogram.percentiles}
    mean = f"{histogram.mean:,.2f}" if histogram.kind == "integer" and histogram.mean < 10 else ""
    table.caption = f"mean {mean or number(histogram.mean, histogram.kind)}, " + ", ".join(
        f"p{p} {shown[p]}" for p in (50, 95, 99)
    )
    table.caption_justify = "left"
    return table


def bin_label(low: float, high: float, kind: str) -> str:
    """Formats a bin's range: integers with both ends included, others as [low, high)."""
    if kind == "integer":
        return f"{low:,.0f}" if high - low == 1 else f"{low:,.0f}–{high - 1:,.0f}"
    if kind == "share":
        return f"{100 * low:.4g}–{100 * high:.4g} %"
    return f"{low:.4g}–{high:.4g}"
