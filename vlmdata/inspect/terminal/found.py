"""Search results in the terminal."""

from __future__ import annotations

from rich.console import Console

from vlmdata.inspect.terminal.draw import columns, data, number
from vlmdata.inspect.trace import FoundSample
from vlmdata.wording import counted


def print_found(console: Console, samples: tuple[FoundSample, ...], total: int, most: int) -> None:
    """Prints at most ``most`` of the samples that a query found."""
    table = columns(
        f"{len(samples):,} of {counted(total, 'sample')}",
        "key",
        "row",
        "tokens",
        "targets",
        "",
        "images",
        "patches",
        left=("key",),
    )
    for sample in samples[:most]:
        table.add_row(
            data(sample.key),
            f"{sample.source_row:,}",
            f"{sample.length:,}",
            f"{sample.targets:,}",
            number(sample.targets / max(sample.length, 1), "share"),
            f"{sample.images:,}",
            f"{sample.patches:,}",
        )
    console.print(table)
    if len(samples) > most:
        console.print(f"… and {len(samples) - most:,} more; --json lists them all")
