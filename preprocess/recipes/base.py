"""What a recipe is, and finding one by name."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Protocol

from preprocess.config import RecipeConfig
from preprocess.conversation import Conversation, Document
from preprocess.reject import RowRejected
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
    """Turns rows into conversations or documents. A pure function of the row: the same row gives the same."""

    def __call__(self, row: Row) -> Conversation | Document | Iterable[Conversation | Document | RowRejected]:
        """The row's conversation or document, or a list, tuple or generator of several.

        A :class:`RowRejected` in the list, in place of a sample, rejects that sample alone.

        Raises:
            RowRejected: If nothing of the row can be used.
        """


class BuiltInRecipe(Recipe, Protocol):
    """What the class of a built-in recipe says of itself. A recipe of your own may leave these out.

    Attributes:
        needs: The columns it reads, in words for messages: ``messages or conversations``.
        options: The options of the command that it obeys, of :data:`RECIPE_OPTIONS`. Others are refused if given.
        documents: Whether it makes documents, which ``--overlong split`` can split; conversations it cannot.
    """

    needs: ClassVar[str]
    options: ClassVar[frozenset[str]]
    documents: ClassVar[bool]

    @staticmethod
    def fits(columns: Collection[str]) -> bool:
        """True if rows with these columns are meant for this recipe.

        Where no recipe is named, the only one that fits is chosen. So this is about what the columns mean, not about
        what the recipe could read: two recipes that fit the same columns make the user choose.
        """


#: Options of the command that a recipe may leave without effect: those of recipes, and those about turns.
RECIPE_OPTIONS = frozenset({field.name for field in fields(RecipeConfig)} | {"train_turns", "train_think"})

#: Recipes by name. A new one is a file or package beside this with a class as BuiltInRecipe says, taking
#: RecipeConfig, and a line here.
REGISTRY: Mapping[str, str] = {
    "cord_v2": "preprocess.recipes.cord_v2:CordV2",
    "chat": "preprocess.recipes.chat:Chat",
    "text": "preprocess.recipes.text:Text",
    "caption": "preprocess.recipes.caption:Caption",
}


def load_recipe(name: str, config: RecipeConfig) -> Recipe:
    """A recipe by registered name or as ``module:attribute``.

    Raises:
        SourceError: If there is none.
    """
    recipe: Recipe = recipe_class(name)(config)
    return recipe


def recipe_fingerprint(name: str) -> str:
    """sha256 of the source that defines the recipe: a changed recipe is another recipe.

    That is the file that defines it. If the recipe is found in a package (``preprocess.recipes.chat:Chat``), it is
    every Python file of the package too, by its path within.
    """
    digest = hashlib.sha256(inspect.getsource(inspect.getmodule(recipe_class(name)) or object).encode())
    package = import_module(REGISTRY.get(name, name).partition(":")[0])
    for folder in map(Path, getattr(package, "__path__", ())):
        for file in sorted(folder.rglob("*.py")):
            source = file.read_bytes()
            digest.update(f"{file.relative_to(folder).as_posix()} {len(source)}\n".encode() + source)
    return digest.hexdigest()


def recipe_class(name: str) -> Any:
    """What makes a recipe: the class of a built-in one, or any callable that takes a RecipeConfig.

    Raises:
        SourceError: If there is none.
    """
    target = REGISTRY.get(name, name)
    module, separator, attribute = target.partition(":")
    known = ", ".join(REGISTRY)
    if not separator:
        raise SourceError(f"--recipe {name}: no such recipe. Known: {known}; or module:attribute of your own.")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise SourceError(f"--recipe {name}: cannot load {target}: {error}. Built in: {known}.") from error
