"""The examples of docs/extend, run as they stand there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from preprocess.conversation import Conversation
from preprocess.recipes.base import Row, describe_options, load_recipe
from preprocess.reject import RowRejected
from tests.conftest import encoded_image

PAGES = Path(__file__).parents[2] / "docs" / "extend"


def write_example(page: str, folder: Path) -> str:
    """Writes a page's first block of code as the module that its first line names; returns the module's name."""
    (code,) = re.findall(r"^```python\n(# (\w+)\.py\n.*?)^```$", (PAGES / page).read_text(), re.DOTALL | re.MULTILINE)
    (folder / f"{code[1]}.py").write_text(code[0])
    return str(code[1])


def test_the_recipe_has_options_and_reads_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{write_example('recipe.md', tmp_path)}:DocVqa"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_recipes", raising=False)
    assert "\n  answer: a whole number, default '0'. Number of the answer" in describe_options([name])
    row = Row(0, {"image": encoded_image(), "question": "Total?", "answers": ["1", "1.00"]})
    made = load_recipe(name, {"answer": "1"})(row)
    assert isinstance(made, Conversation)
    assert [message.text for message in made.messages] == ["Total? Answer briefly.", "1.00"]
    with pytest.raises(RowRejected, match="answers has 2 elements"):
        load_recipe(name, {"answer": 2})(row)
