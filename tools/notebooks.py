"""Writes the examples as notebooks: ``python -m tools.notebooks`` after a change of ``examples/*.py``."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
#: The command line of a script, and what a notebook has in its place: Jupyter's own command line is none of ours.
OF_SCRIPT, OF_NOTEBOOK = "parser.parse_args()", "parser.parse_args([])"
_CELL = "# %% "


def notebook(script: str) -> str:
    """Returns a script of ``# %%`` cells as a notebook: its docstring and the titles of its cells are texts."""
    text = ast.get_docstring(ast.parse(script)) or ""
    head, *cells = f"\n{script}".split(f"\n{_CELL}")
    if head.strip() != f'"""{text}\n"""' and head.strip() != f'"""{text}"""':
        raise ValueError("code before the first cell")
    made = [_cell("markdown", text)]
    for cell in cells:
        title, _, code = cell.partition("\n")
        made += [_cell("markdown", f"## {title}"), _cell("code", code.strip().replace(OF_SCRIPT, OF_NOTEBOOK))]
    for number, each in enumerate(made):
        each["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    content = {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _cell(kind: str, text: str) -> dict[str, Any]:
    of_code: dict[str, Any] = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "metadata": {}, "source": text.splitlines(keepends=True), **of_code}


if __name__ == "__main__":
    for path in EXAMPLES.glob("*.py"):
        path.with_suffix(".ipynb").write_text(notebook(path.read_text(encoding="utf-8")), encoding="utf-8")
