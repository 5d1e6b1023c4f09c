"""What a recipe is, and finding one by name."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, ClassVar, Protocol

from preprocess.conversation import Conversation, Document
from preprocess.recipes.media import MediaLoader
from preprocess.recipes.options import NoOptions, declared_options, listed, make_options
from preprocess.registry import find
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
    """What the class of a built-in recipe says of itself. A recipe of your own may leave all of it out.

    Its constructor may take ``options``, an instance of its ``Options``, and ``media``, the run's
    :class:`MediaLoader`. Both are passed by name, so it takes only what it needs.

    Attributes:
        needs: The columns it reads, in words for messages: ``messages or conversations``.
        makes: ``Conversation``, ``Document`` or both. Options of the command that are about the other are refused.
        Options: A frozen dataclass of its options, each ``Annotated[type, "What it does."]``. See
            ``preprocess/recipes/options.py`` for the types.
    """

    needs: ClassVar[str]
    makes: ClassVar[tuple[type, ...]]
    Options: ClassVar[type]

    @staticmethod
    def fits(columns: Collection[str]) -> bool:
        """True if rows with these columns are meant for this recipe.

        Where no recipe is named, the only one that fits is chosen. So this is about what the columns mean, not about
        what the recipe could read: two recipes that fit the same columns make the user choose.
        """


#: Recipes by name. A new one is a file or package beside this with a class as BuiltInRecipe says, and a line here.
REGISTRY: Mapping[str, str] = {
    "cord_v2": "preprocess.recipes.cord_v2:CordV2",
    "chat": "preprocess.recipes.chat:Chat",
    "text": "preprocess.recipes.text:Text",
    "caption": "preprocess.recipes.caption:Caption",
}
#: What a recipe's constructor may take.
_OPTIONS, _MEDIA = "options", "media"


def load_recipe(name: str, options: Mapping[str, Any] | None = None, media: MediaLoader | None = None) -> Recipe:
    """A recipe by registered name or as ``module:attribute``.

    Args:
        name: The name.
        options: Its options by name, as text or values; those left out have their defaults.
        media: Loads the images that rows name. By default neither paths nor URLs are allowed.

    Raises:
        SourceError: If there is no such recipe, or the options are wrong.
    """
    made, taken = recipe_class(name), constructor_takes(name)
    if _OPTIONS not in taken and options_class(name) is not NoOptions:
        raise SourceError(f"--recipe {name}: it declares Options, but its constructor takes no `{_OPTIONS}`")
    parts = {_OPTIONS: recipe_options(name, options or {}), _MEDIA: media or MediaLoader(None, False)}
    recipe: Recipe = made(**{part: value for part, value in parts.items() if part in taken})
    return recipe


def options_class(name: str) -> type:
    """The dataclass of a recipe's options."""
    declared: type = getattr(recipe_class(name), "Options", NoOptions)
    return declared


def recipe_options(name: str, given: Mapping[str, Any]) -> Any:
    """An instance of a recipe's ``Options``.

    Raises:
        SourceError: If there is no such recipe or option, or a value is not of the option's type.
    """
    others = [other for other in REGISTRY if set(given) <= {field.name for field in fields(options_class(other))}]
    hint = f" (--recipe {' or '.join(others)} would have it)" if others else ""
    return make_options(name, options_class(name), given, hint)


def describe_options(names: Iterable[str] | None = None) -> str:
    """The options of recipes, a line each; of all built-in recipes if none is named."""
    return "\n".join(listed(name, declared_options(options_class(name))) for name in names or REGISTRY)


def constructor_takes(name: str) -> frozenset[str]:
    """Which of ``options`` and ``media`` a recipe's constructor takes.

    Raises:
        SourceError: If it needs anything else.
    """
    parameters = signature(recipe_class(name)).parameters.values()
    fixed = [each for each in parameters if each.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)]
    for each in fixed:
        if each.name not in (_OPTIONS, _MEDIA) and each.default is Parameter.empty:
            raise SourceError(
                f"--recipe {name}: its constructor needs `{each.name}`. It may take `{_OPTIONS}`, an instance of its "
                f"Options, and `{_MEDIA}`, which loads images."
            )
    return frozenset({each.name for each in fixed} & {_OPTIONS, _MEDIA})


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
    """What makes a recipe: the class of a built-in one, or any callable that gives a recipe.

    Raises:
        SourceError: If there is none.
    """
    return find("--recipe", name, REGISTRY)
