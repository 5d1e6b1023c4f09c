"""How large stored items are, in a few words: for the summaries of commands and the card of a dataset."""

from __future__ import annotations

from vlmdata.format.manifest import Totals


def item_sizes(totals: Totals, pixels: str) -> str:
    """What an item takes, and that against its file: ``zstd: 357 KB each, 1.22 times the 293 KB of its file``.

    Returns:
        The text; empty if there are no items, or the manifest does not have their sizes.
    """
    if not totals.items or not totals.item_bytes:
        return ""
    each = f"{pixels}: {_size(totals.item_bytes / totals.items)} each"
    if not totals.file_bytes:
        return each
    times = totals.item_bytes / totals.file_bytes
    return f"{each}, {times:.2f} times the {_size(totals.file_bytes / totals.items)} of its file"


def _size(number: float) -> str:
    return f"{number / 1e6:,.1f} MB" if number >= 999_500 else f"{number / 1e3:,.0f} KB" if number >= 1e3 else "<1 KB"
