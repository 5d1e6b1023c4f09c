"""Prints what limits on the length of samples would cost."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vlmdata.preprocess.run.lengths import LengthReport
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
            Text(f"fit at half: with --max-pixels {report.half} instead of {report.max_pixels}", "dim"), highlight=False
        )
    if report.images:
        console.print(_images(report, pixels_per_token))


def _limits(report: LengthReport) -> Table:
    half = () if report.half is None else ("fit at half",)
    columns = ("limit", "samples over", "tokens in them", "targets in them", "tokens cut", "targets cut")
    table = Table(*columns, "of images", *half, title="what a limit costs", title_justify="left")
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
    table = Table(
        *("images of", "megapixels", "number", "of all tokens", *over), title="images by size", title_justify="left"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    least = 0
    for each in report.images:
        most = each.most_tokens or least
        bound, size = ("up to", most) if each.most_tokens is not None else ("more than", least)
        table.add_row(
            f"{bound} {size:,} tokens",
            f"{size * pixels_per_token / 1e6:.2f}",
            f"{each.images:,}",
            _share(each.tokens, report.tokens),
            *(f"{number:,}" for number in each.in_samples_over),
        )
        least = most
    return table


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "0.0%"
