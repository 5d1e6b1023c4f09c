"""Rows of which some are bad, and recipes of a test's own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import cord_row, encoded_image, write_cord_parquet


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Eight rows of which rows 2, 3 and 5 are bad, each in its own way."""
    rows = [cord_row(n) for n in range(8)]
    rows[2]["image"]["bytes"] = encoded_image(seed=2, width=200, height=200)[:2000]
    rows[3]["ground_truth"] = "{"
    rows[5]["image"]["bytes"] = b"no image at all"
    return write_cord_parquet(tmp_path / "source" / "train.parquet", rows)


@pytest.fixture
def recipe_module(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Writes a recipe module; gives the name for ``--recipe``."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    sys.path.insert(0, str(folder))
    names = []

    def write(body: str) -> str:
        names.append(f"recipe_of_{tmp_path.name}_{len(names)}".replace("-", "_"))
        header = "from vlmdata.preprocess.recipes.cord_v2 import CordV2\nfrom vlmdata.errors import SourceError\n\n\n"
        (folder / f"{names[-1]}.py").write_text(header + body)
        return f"{names[-1]}:Custom"

    yield write
    sys.path.remove(str(folder))
    for name in names:
        sys.modules.pop(name, None)
