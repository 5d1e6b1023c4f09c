"""The recipe protocol, and loading recipes by name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar, Protocol

from preprocess.config import PreprocessConfig
from preprocess.conversation import Conversation, Document
from preprocess.own_options import make_own
from preprocess.recipes.context import RecipeContext
from preprocess.recipes.media import MediaLoader
from preprocess.reject import RowRejected
from preprocess.row import Row
from vlmdata.errors import SourceError
from vlmdata.registry import Registry, not_callable


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

    Its constructor may take ``options``, an instance of its ``Options``, ``media``, the run's :class:`MediaLoader`,
    and ``context``, a :class:`RecipeContext`. They are passed by name, so it only takes what it needs.

    Attributes:
        needs: The columns that it reads, in words for messages: ``messages or conversations``.
        makes: ``Conversation``, ``Document`` or both. Options of the command for the other are errors.
        Options: A frozen dataclass of its options, each ``Annotated[type, "What it does."]``. See
            ``preprocess/own_options.py`` for the types.
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
REGISTRY = Registry[Any](
    "recipe",
    "vlmdata.recipes",
    "--recipe",
    not_callable,
    {
        "cord_v2": "preprocess.recipes.cord_v2:CordV2",
        "chat": "preprocess.recipes.chat:Chat",
        "text": "preprocess.recipes.text:Text",
        "caption": "preprocess.recipes.caption:Caption",
    },
    SourceError,
)
#: What a recipe's constructor may take besides its options.
PARTS = ("media", "context")


def load_recipe(
    name: str,
    options: Mapping[str, Any] | None = None,
    media: MediaLoader | None = None,
    context: RecipeContext | None = None,
) -> Recipe:
    """Loads a recipe by name, as ``module:attribute`` or as ``file.py:attribute``.

    Args:
        name: The name.
        options: Its options by name, as text or values; omitted options have their defaults.
        media: Loads the images that rows name. By default neither paths nor URLs are allowed.
        context: What it may know of the run; by default that of a run with default options.

    Raises:
        SourceError: If the recipe is unknown, is none or cannot be made, or the options are invalid.
    """
    context = context or RecipeContext.of(PreprocessConfig())
    parts = {"media": media or MediaLoader(None, False), "context": context}
    recipe: Recipe = make_own(REGISTRY, name, options or {}, parts)
    if not callable(recipe):
        raise SourceError(f"--recipe {name}: it has no method __call__(self, row), which converts a row.")
    return recipe
