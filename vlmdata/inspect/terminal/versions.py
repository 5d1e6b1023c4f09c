"""The versions of a dataset in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from vlmdata.inspect.versions import VersionDescription


def print_versions(console: Console, versions: Sequence[VersionDescription]) -> None:
    """Prints a line for each version. A dash stands for what its parent would tell."""
    columns = ("version", "parent", "samples", "rows kept", "made", "removed", "shards", "added", "removed")
    table = Table(title="versions", title_justify="left")
    for name in columns:
        table.add_column(name, justify="right")
    for each in versions:
        pruned = each.parent is None and each.parent_fingerprint is not None
        rows = [_or_dash(each.rows.get(name)) for name in ("kept", "made", "removed")]
        shards = (f"{each.shards:,}", _or_dash(each.shards_added), _or_dash(each.shards_removed))
        parent = "pruned" if pruned else _or_dash(each.parent)
        table.add_row(f"{each.number}", parent, f"{each.samples:,}", *rows, *shards)
    console.print(table)


def _or_dash(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"
