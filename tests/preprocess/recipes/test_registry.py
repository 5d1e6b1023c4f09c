"""What every built-in recipe says of itself, and that it is true."""

from __future__ import annotations

import dataclasses
import inspect
from itertools import product
from pathlib import Path

import pytest

from vlmdata.preprocess.cli import preprocess as command
from vlmdata.preprocess.conversation import Conversation, Document
from vlmdata.preprocess.own_options import constructor_takes, declared_options, describe_options, options_class
from vlmdata.preprocess.recipes.base import PARTS, load_recipe
from vlmdata.preprocess.recipes.choice import recipes_for
from vlmdata.preprocess.registries import RECIPES

DOCS = Path(__file__).parents[3] / "docs" / "recipes.md"


@pytest.mark.parametrize("name", RECIPES)
class TestEveryRecipe:
    def test_names_the_columns_it_needs_in_words(self, name: str) -> None:
        assert RECIPES.find(name).needs

    def test_says_what_it_makes(self, name: str) -> None:
        assert set(RECIPES.find(name).makes) <= {Conversation, Document}
        assert RECIPES.find(name).makes

    def test_takes_rows_with_its_columns_alone(self, name: str) -> None:
        for form in RECIPES.find(name).takes:
            assert form.needs
            for columns in product(*form.needs):
                assert name in recipes_for(set(columns))
                assert not any(form.taken(set(columns) - set(group)) for group in form.needs)

    def test_declares_its_options_with_defaults_and_meanings(self, name: str) -> None:
        options = options_class(RECIPES, name)
        assert dataclasses.is_dataclass(options)
        assert options.__dataclass_params__.frozen  # type: ignore[attr-defined]
        for option in declared_options(options):
            assert option.default is not None, option
            assert option.meaning.endswith("."), option

    def test_is_made_of_its_options_and_media(self, name: str) -> None:
        assert constructor_takes(RECIPES, name, PARTS) == {"options", "media"}
        assert callable(load_recipe(name))

    def test_is_documented_with_its_options(self, name: str) -> None:
        docs = DOCS.read_text()
        assert f"`{name}`" in docs
        for option in declared_options(options_class(RECIPES, name)):
            assert option.name in docs

    def test_stands_in_the_help_and_its_options_in_that_of_options(self, name: str) -> None:
        (recipe,) = inspect.signature(command.preprocess, eval_str=True).parameters["recipe"].annotation.__metadata__
        assert f"`{name}`" in recipe.help
        for declared in declared_options(options_class(RECIPES, name)):
            assert f"\n  {declared.name}: " in describe_options(RECIPES)


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("cord_v2", ["image", "ground_truth"]),
        ("chat", ["messages"]),
        ("chat", ["messages", "images"]),
        ("chat", ["conversations", "image", "id"]),
        ("chat", ["instruction", "input", "output", "images"]),
        ("chat", ["query", "response", "history", "system"]),
        ("chat", ["prompt", "completion", "images"]),
        ("caption", ["image", "txt", "__key__"]),
        ("caption", ["image", "text"]),
        ("chat", ["image", "text", "conversations"]),
        ("caption", ["image_url", "caption", "transcripts"]),
        ("text", ["images", "texts"]),
        ("vqa", ["question", "image", "answers", "question_id"]),
        ("vqa", ["image", "query", "label"]),
        ("grounding", ["question", "image", "answer", "bbox", "segmentation"]),
        ("grounding", ["image_url", "points", "label", "count"]),
        ("grounding", ["image", "objects", "width", "height"]),
        ("chat", ["messages", "images", "objects"]),
        ("chat", ["query", "response", "image", "label"]),
    ],
)
def test_these_columns_fit_one_recipe(name: str, columns: list[str]) -> None:
    assert recipes_for(columns) == [name]
