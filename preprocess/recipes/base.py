"""What a recipe is, and finding one by name."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from preprocess.config import RecipeConfig
from preprocess.conversation import Conversation
from vlmdata.errors import SourceError


@dataclass(frozen=True)
class Row:
    """A source row.

    Attributes:
        number: Position in the source split.
        values: Column values; images are undecoded ``{"bytes": …, "path": …}`` mappings.
    """

    number: int
    values: Mapping[str, Any]


class Recipe(Protocol):
    """Turns rows into conversations. Called as a pure function of the row: the same row, the same conversation."""

    def __call__(self, row: Row) -> Conversation:
        """The row's conversation.

        Raises:
            RowRejected: If the row cannot become one.
        """


#: Recipes by name. A new one is a file beside this with a class taking RecipeConfig, and a line here.
REGISTRY: Mapping[str, str] = {
    "cord_v2": "preprocess.recipes.cord_v2:CordV2",
    "chat": "preprocess.recipes.chat:Chat",
}


def load_recipe(name: str, config: RecipeConfig) -> Recipe:
    """A recipe by registered name or as ``module:attribute``.

    Raises:
        SourceError: If there is none.
    """
    recipe: Recipe = _factory(name)(config)
    return recipe


def recipe_fingerprint(name: str) -> str:
    """sha256 of the source file that defines the recipe: a changed recipe is another recipe."""
    source = inspect.getsource(inspect.getmodule(_factory(name)) or object)
    return hashlib.sha256(source.encode()).hexdigest()


def _factory(name: str) -> Any:
    target = REGISTRY.get(name, name)
    module, separator, attribute = target.partition(":")
    known = ", ".join(REGISTRY)
    if not separator:
        raise SourceError(f"--recipe {name}: no such recipe. Known: {known}; or module:attribute of your own.")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise SourceError(f"--recipe {name}: cannot load {target}: {error}. Built in: {known}.") from error
