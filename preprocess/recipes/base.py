"""The recipe protocol, and loading recipes by name."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields, is_dataclass
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, ClassVar, Protocol

from preprocess.conversation import Conversation, Document
from preprocess.recipes.media import MediaLoader
from preprocess.recipes.options import NoOptions, declared_options, listed, make_options
from preprocess.registry import find, module_named, problem_of
from preprocess.reject import RowRejected
from preprocess.row import Row
from vlmdata.errors import SourceError, VlmdataError


class Recipe(Protocol):
    """Converts rows to conversations or documents. A pure function of the row."""

    def __call__(self, row: Row) -> Conversation | Document | Iterable[Conversation | Document | RowRejected]:
        """Returns the row's conversation or document, or a list, tuple or generator of several.

        A :class:`RowRejected` in the list rejects only the sample in its place.

        Raises:
            RowRejected: If the whole row cannot be used.
        """


class BuiltInRecipe(Recipe, Protocol):
    """Class attributes of a built-in recipe. Your own recipe may omit all of them.

    Its constructor may take ``options``, an instance of its ``Options``, and ``media``, the run's
    :class:`MediaLoader`. Both are passed by name, so it only takes what it needs.

    Attributes:
        needs: The columns that it reads, in words for messages: ``messages or conversations``.
        makes: ``Conversation``, ``Document`` or both. Options of the command for the other are errors.
        Options: A frozen dataclass of its options, each ``Annotated[type, "What it does."]``. See
            ``preprocess/recipes/options.py`` for the types.
    """

    needs: ClassVar[str]
    makes: ClassVar[tuple[type, ...]]
    Options: ClassVar[type]

    @staticmethod
    def fits(columns: Collection[str]) -> bool:
        """True if rows with these columns are meant for this recipe.

        Without ``--recipe``, the only recipe that fits is used. So this is about the meaning of the columns, not about
        what the recipe could read: if two recipes fit the same columns, the user must choose.
        """


#: Recipes by name. To add one, add a file or package here with a class like BuiltInRecipe, and a line below.
REGISTRY: Mapping[str, str] = {
    "cord_v2": "preprocess.recipes.cord_v2:CordV2",
    "chat": "preprocess.recipes.chat:Chat",
    "text": "preprocess.recipes.text:Text",
    "caption": "preprocess.recipes.caption:Caption",
}
#: Arguments that a recipe's constructor may take.
_OPTIONS, _MEDIA = "options", "media"


def load_recipe(name: str, options: Mapping[str, Any] | None = None, media: MediaLoader | None = None) -> Recipe:
    """Loads a recipe by registered name, as ``module:attribute`` or as ``file.py:attribute``.

    Args:
        name: The name.
        options: Its options by name, as text or values; omitted options have their defaults.
        media: Loads the images that rows name. By default neither paths nor URLs are allowed.

    Raises:
        SourceError: If the recipe is unknown, is none or cannot be made, or the options are invalid.
    """
    made, taken = recipe_class(name), constructor_takes(name)
    if _OPTIONS not in taken and options_class(name) is not NoOptions:
        raise SourceError(f"--recipe {name}: it declares Options, but its constructor does not take `{_OPTIONS}`")
    parts = {_OPTIONS: recipe_options(name, options or {}), _MEDIA: media or MediaLoader(None, False)}
    try:
        recipe: Recipe = made(**{part: value for part, value in parts.items() if part in taken})
    except VlmdataError:
        raise
    except Exception as error:  # the constructor is the user's
        raise SourceError(f"--recipe {name}: its constructor failed: {problem_of(error)}") from error
    if not callable(recipe):
        raise SourceError(f"--recipe {name}: it has no method __call__(self, row), which converts a row.")
    return recipe


def options_class(name: str) -> type:
    """Returns the dataclass of a recipe's options.

    Raises:
        SourceError: If there is no such recipe, or they are no dataclass.
    """
    declared: type = getattr(recipe_class(name), "Options", NoOptions)
    if not is_dataclass(declared):
        raise SourceError(f"--recipe {name}: its Options must be a frozen dataclass: write @dataclass(frozen=True).")
    return declared


def recipe_options(name: str, given: Mapping[str, Any]) -> Any:
    """Creates an instance of a recipe's ``Options``.

    Raises:
        SourceError: If the recipe or an option is unknown, or a value has the wrong type.
    """
    others = [other for other in REGISTRY if set(given) <= {field.name for field in fields(options_class(other))}]
    hint = f" (--recipe {' or '.join(others)} has it)" if others else ""
    return make_options(name, options_class(name), given, hint)


def describe_options(names: Iterable[str] | None = None) -> str:
    """Describes the options of recipes, one line each; by default of all built-in recipes."""
    return "\n".join(listed(name, declared_options(options_class(name))) for name in names or REGISTRY)


def constructor_takes(name: str) -> frozenset[str]:
    """Returns which of ``options`` and ``media`` a recipe's constructor takes.

    Raises:
        SourceError: If the constructor needs other arguments.
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
    """Returns the sha256 of the recipe's source code. A changed recipe is a different recipe.

    The source code is the file that defines the recipe. If the module is a package (``preprocess.recipes.chat:Chat``),
    it includes every Python file of the package, by relative path.
    """
    digest = hashlib.sha256(inspect.getsource(inspect.getmodule(recipe_class(name)) or object).encode())
    package = module_named(REGISTRY.get(name, name).partition(":")[0])
    for folder in map(Path, getattr(package, "__path__", ())):
        for file in sorted(folder.rglob("*.py")):
            source = file.read_bytes()
            digest.update(f"{file.relative_to(folder).as_posix()} {len(source)}\n".encode() + source)
    return digest.hexdigest()


def recipe_class(name: str) -> Any:
    """Returns the factory of a recipe: the class of a built-in one, or any callable that returns a recipe.

    Raises:
        SourceError: If there is no such recipe.
    """
    return find("--recipe", name, REGISTRY)
