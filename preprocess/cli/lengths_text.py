"""Prints what limits on the length of samples would cost."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from preprocess.run.lengths import ImageClass, LengthReport
from vlmdata.wording import counted


def print_lengths(console: Console, report: LengthReport, pixels_per_token: int) -> None:
    """Prints a report.

    Args:
        console: Where to.
        report: The report.
        pixels_per_token: Pixels of an image that are one token.
    """
    of_images = _share(report.image_tokens, report.tokens)
    console.print(
        f"{counted(report.samples, 'sample')} of {counted(report.rows, 'row')}: {counted(report.tokens, 'token')} "
        f"({of_images} of images), {counted(report.targets, 'target')}; the longest has {report.longest:,}",
        highlight=False,
    )
    if report.rejects:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in report.rejects.items())
        console.print(f"not measured, because rejected: {reasons}", highlight=False)
    console.print(_limits(report))
    if report.half is not None:
        console.print(
            Text(f"half the pixels: --max-pixels {report.half} instead of {report.max_pixels}", "dim"), highlight=False
        )
    if report.images:
        console.print(_images(report, pixels_per_token))


def _limits(report: LengthReport) -> Table:
    half = () if report.half is None else ("fit at half the pixels",)
    columns = ("--max-length", "samples over", "their tokens", "their targets", "beyond it", "targets beyond")
    table = Table(*columns, "images in them", *half, title="what a limit costs", title_justify="left")
    for column in table.columns:
        column.justify = "right"
    for each in report.limits:
        table.add_row(
            f"{each.limit:,}",
            f"{each.samples:,} ({_share(each.samples, report.samples)})",
            f"{each.tokens:,} ({_share(each.tokens, report.tokens)})",
            f"{each.targets:,} ({_share(each.targets, report.targets)})",
            f"{each.tokens_beyond:,} ({_share(each.tokens_beyond, report.tokens)})",
            f"{each.targets_beyond:,} ({_share(each.targets_beyond, report.targets)})",
            _share(each.image_tokens, each.tokens) if each.tokens else "",
            *([f"{each.fit_at_half:,} of {each.samples:,}"] if each.fit_at_half is not None else []),
        )
    return table


def _images(report: LengthReport, pixels_per_token: int) -> Table:
    over = [f"in samples over {each.limit:,}" for each in report.limits]
    table = Table("image of", "images", "share of all tokens", *over, title="images by size", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    least = 0
    for each in report.images:
        found = [f"{number:,}" for number in each.in_samples_over]
        share = _share(each.tokens, report.tokens)
        table.add_row(_size(least, each, pixels_per_token), f"{each.images:,}", share, *found)
        least = each.most_tokens or 0
    return table


def _size(least: int, images: ImageClass, pixels_per_token: int) -> str:
    if images.most_tokens is None:
        return f"more tokens ({least * pixels_per_token / 1e6:.2g} megapixels and more)"
    return f"up to {images.most_tokens:,} tokens ({images.most_tokens * pixels_per_token / 1e6:.2g} megapixels)"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "0.0%"
