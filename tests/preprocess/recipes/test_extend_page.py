"""The recipe of docs/extend/recipe.md, run as it stands there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.conftest import encoded_image
from tests.preprocess.extend_pages import write_example
from vlmdata.preprocess.conversation import Conversation
from vlmdata.preprocess.own_options import describe_options
from vlmdata.preprocess.recipes.base import load_recipe
from vlmdata.preprocess.registries import RECIPES
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.row import Row


def test_the_recipe_has_options_and_reads_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{write_example('recipe.md', tmp_path)}:DocVqa"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_recipes", raising=False)
    assert "\n  answer: a whole number, default '0'. Number of the answer" in describe_options(RECIPES, [name])
    row = Row(0, {"image": encoded_image(), "question": "Total?", "answers": ["1", "1.00"]})
    made = load_recipe(name, {"answer": "1"})(row)
    assert isinstance(made, Conversation)
    assert [message.text for message in made.messages] == ["Total? Answer briefly.", "1.00"]
    with pytest.raises(RowRejected, match="answers has 2 elements"):
        load_recipe(name, {"answer": 2})(row)
