"""The recipe of docs/extend/recipe.md, run as it stands there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.conftest import encoded_image
from tests.preprocess.extend_pages import write_example
from vlmdata.cli.main import app
from vlmdata.format.manifest import Manifest
from vlmdata.preprocess.conversation import Conversation
from vlmdata.preprocess.own_options import describe_options
from vlmdata.preprocess.recipes.base import load_recipe
from vlmdata.preprocess.recipes.choice import recipes_for
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


def test_a_recipe_that_takes_more_columns_is_chosen_and_its_neighbours_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = next(number for number in range(9) if write_example("recipe.md", tmp_path, number) == "tagged")
    assert example
    monkeypatch.setattr(RECIPES, "_given", {})
    monkeypatch.chdir(tmp_path)
    assert recipes_for(["image", "text", "tone"]) == ["caption"]
    monkeypatch.setenv("VLMDATA_RECIPES", "tagged.py:Tagged")
    assert recipes_for(["image", "text", "tone"]) == ["tagged"]
    assert recipes_for(["image", "text"]) == ["caption"]
    assert recipes_for(["image", "text", "tone", "messages"]) == ["chat"]
    assert recipes_for(["image", "text", "tone", "question", "answer"]) == ["vqa", "tagged"]
    image = encoded_image(32, 32)
    (tmp_path / "a.png").write_bytes(image["bytes"] if isinstance(image, dict) else image)
    row = {"image": "a.png", "text": "Bars.", "tone": "dry"}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n")
    command = ["preprocess", "rows.jsonl", "--tokenizer", "embedded", "-j", "1"]
    for words in (["--out", "data"], ["--trace", "0"], ["--lengths", "64"]):
        done = CliRunner().invoke(app, command + words)
        assert done.exit_code == 0, done.output
        assert "recipe tagged, chosen by the columns" in done.stderr
    config = Manifest.read(tmp_path / "data").config
    assert config["options"]["recipe"] == "tagged"
    again = ["retokenize", "data", "--source", "rows.jsonl", "--tokenizer", "embedded", "--out", "again", "-j", "1"]
    done = CliRunner().invoke(app, again)
    assert done.exit_code == 0, done.output
    assert Manifest.read(tmp_path / "again").config == config
