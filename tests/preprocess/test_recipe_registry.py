"""What every built-in recipe says of itself, and that it is true."""

from __future__ import annotations

import pytest

from preprocess.config import RecipeConfig
from preprocess.recipes.base import RECIPE_OPTIONS, REGISTRY, load_recipe, recipe_class


@pytest.mark.parametrize("name", REGISTRY)
class TestEveryRecipe:
    def test_names_the_columns_it_needs_in_words(self, name: str) -> None:
        assert recipe_class(name).needs

    def test_obeys_options_that_there_are(self, name: str) -> None:
        assert recipe_class(name).options <= RECIPE_OPTIONS

    def test_fits_no_row_without_columns(self, name: str) -> None:
        assert recipe_class(name).fits([]) is False

    def test_is_made_from_a_config(self, name: str) -> None:
        assert callable(load_recipe(name, RecipeConfig()))


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
    ],
)
def test_these_columns_fit_one_recipe(name: str, columns: list[str]) -> None:
    assert [each for each in REGISTRY if recipe_class(each).fits(columns)] == [name]
