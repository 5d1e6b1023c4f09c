"""Near duplicates in the terminal: the sample that stays on the left, the other one on the right."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vlmdata.inspect.duplicates import Pair, Side
from vlmdata.inspect.terminal.draw import data
from vlmdata.inspect.text import one_line
from vlmdata.wording import counted

_SHOWN = 400


def print_pairs(console: Console, pairs: Sequence[Pair], of: int) -> None:
    """Prints pairs, the first of ``of``."""
    table = Table(title=counted(of, "near duplicate"), show_lines=True, title_justify="left")
    for name in ("likeness", "stays", "dropped"):
        table.add_column(name, ratio=None if name == "likeness" else 1)
    for pair in pairs:
        table.add_row(Text(f"{100 * pair.likeness:.1f} %"), _side(pair.kept), _side(pair.dropped))
    console.print(table)
    if len(pairs) < of:
        console.print(Text(f"… {of - len(pairs):,} more; --json lists all", "dim"))


def _side(side: Side) -> Text:
    facts = f"{side.key}  {counted(side.length, 'token')}, {counted(side.images, 'image')}\n"
    return Text.assemble((facts, "bold"), data(one_line(side.text), limit=_SHOWN).plain, no_wrap=False, overflow="fold")
