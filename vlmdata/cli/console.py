"""The consoles and the progress bar of commands. Rich is imported on use."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


def is_command() -> bool:
    """Whether this process is the command ``vlmdata`` and nothing else."""
    return Path(sys.argv[0]).stem == "vlmdata"


def messages() -> Console:
    """Returns the console of everything except the result: stderr."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, emoji=False)


def results(*, soft_wrap: bool = False) -> Console:
    """Returns the console of the result: stdout."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=soft_wrap, emoji=False)


def counting_bar(console: Console, *, time_left: bool = True) -> Progress:
    """Returns a progress bar with counts, which a console that is no terminal does not show."""
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = [*Progress.get_default_columns()[:2], MofNCompleteColumn()]
    return Progress(
        *columns, *([TimeRemainingColumn()] if time_left else []), console=console, disable=not console.is_terminal
    )
