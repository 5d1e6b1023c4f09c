"""The examples of docs/extend as modules."""

from __future__ import annotations

import re
from pathlib import Path

PAGES = Path(__file__).parents[2] / "docs" / "extend"


def write_example(page: str, folder: Path, number: int = 0) -> str:
    """Writes a page's block of code as the module that the block's first line names; returns the module's name."""
    code = re.findall(r"^```python\n(# (\w+)\.py\n.*?)^```$", (PAGES / page).read_text(), re.DOTALL | re.MULTILINE)[
        number
    ]
    (folder / f"{code[1]}.py").write_text(code[0])
    return str(code[1])


def write_named_file(page: str, path: str, folder: Path) -> str:
    """Writes the first block of code after a file's name as a module of that name; returns the module's name."""
    text = (PAGES / page).read_text()
    (code,) = re.findall(rf"`{re.escape(path)}`.*?^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (folder / Path(path).name).write_text(code)
    return Path(path).stem
