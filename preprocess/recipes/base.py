"""The recipe protocol, loading recipes by name, and the candidates that a recipe gives for a row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from traceback import walk_tb
from typing import Any, ClassVar, Protocol

from vlmdata.errors import SourceError
from vlmdata.preprocess.config import PreprocessConfig
from vlmdata.preprocess.conversation import Conversation, Document
from vlmdata.preprocess.own_options import make_own
from vlmdata.preprocess.recipes.context import RecipeContext
from vlmdata.preprocess.recipes.keys import Columns
from vlmdata.preprocess.recipes.media import MediaLoader
from vlmdata.preprocess.registries import RECIPES
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.row import Row
from vlmdata.reasons import Reason
from vlmdata.registry import shown_name
from vlmdata.wording import with_article

_WANTED = "a Conversation or Document"


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
        takes: The columns of its rows, in each form. Without ``--recipe``, the recipe that takes the most of a source's
            columns is used. So this is about the meaning of the columns, not about what the recipe could read: if none
            of two takes all columns of the other, the user must choose.
        needs: These columns in words, for messages: ``messages or conversations``.
        makes: ``Conversation``, ``Document`` or both. Options of the command for the other are errors.
        Options: A frozen dataclass of its options, each ``Annotated[type, "What it does."]``. See
            ``preprocess/own_options.py`` for the types.
    """

    takes: ClassVar[tuple[Columns, ...]]
    needs: ClassVar[str]
    makes: ClassVar[tuple[type, ...]]
    Options: ClassVar[type]


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
    recipe: Recipe = make_own(RECIPES, name, options or {}, parts)
    if not callable(recipe):
        raise SourceError(f"--recipe {name}: it has no method __call__(self, row), which converts a row.")
    return recipe


@dataclass(frozen=True, eq=False)
class Candidate:
    """A candidate for a sample."""

    made: Conversation | Document | RowRejected  # result of the recipe, or its rejection of this list element
    sample: int | None = None  # number within the row's list; None without a list
    of: int = 1  # length of the list


def candidates_of(recipe: Recipe, row: Row, kept: Sequence[str] = ()) -> list[Candidate]:
    """Calls the recipe on a row.

    Args:
        recipe: The recipe.
        row: The row.
        kept: Columns that the index keeps (``--keep-columns``), which are therefore not unused.

    Returns:
        One candidate without a number for a Conversation or Document; the numbered elements of a list, tuple or
        generator.

    Raises:
        RowRejected: As raised by the recipe; NO_SAMPLES for an empty list.
        TypeError: If the recipe returned something else.
    """
    made: Any = recipe(row)
    if isinstance(made, Conversation | Document):
        return [Candidate(_without_kept(made, kept))]
    if not isinstance(made, list | tuple | Iterator):
        raise TypeError(f"the recipe returned {_described(made)}; it must return {_WANTED}, or a list of them")
    elements = list(made)
    if not elements:
        raise RowRejected(Reason.NO_SAMPLES, "the recipe returned an empty list")
    found = [_element(element, i) for i, element in enumerate(elements)]
    return [Candidate(_without_kept(element, kept), i, len(elements)) for i, element in enumerate(found)]


def _without_kept[T: Conversation | Document | RowRejected](made: T, kept: Sequence[str]) -> T:
    """Returns what a recipe made, without kept columns among its unused keys; ``meta.lang`` counts as ``meta``."""
    if isinstance(made, RowRejected) or not kept:
        return made
    columns = {*kept, *(name.partition(".")[0] for name in kept)}
    unused, unknown = (tuple(key for key in keys if key not in columns) for keys in (made.unused, made.unknown))
    return replace(made, unused=unused, unknown=unknown)


def _element(element: Any, number: int) -> Conversation | Document | RowRejected:
    if isinstance(element, Conversation | Document | RowRejected):
        return element
    wrong = f"the recipe returned a list whose element {number} is {_described(element)}; it must be {_WANTED}"
    return RowRejected(Reason.UNEXPECTED_ERROR, wrong)


def _described(value: Any) -> str:
    return "None" if value is None else with_article(type(value).__name__)


def unexpected(error: Exception, recipe: Recipe) -> RowRejected:
    """Converts an unexpected error to a rejection that names the place in the recipe.

    The place is the innermost frame in the recipe's module or package; failing that, the innermost frame. The message
    names the module, so that it is the same in any folder.
    """
    frames = [
        (frame.f_globals.get("__name__", "?"), line, frame.f_code) for frame, line in walk_tb(error.__traceback__)
    ]
    home = str(getattr(recipe, "__module__", ""))
    package = home.rpartition(".")[0]
    own = [frame for frame in frames if frame[0] == home or (package and frame[0].startswith(f"{package}."))]
    where = ""
    if frames:
        module, line, code = (own or frames)[-1]
        where = f" (in {code.co_name}, {shown_name(module).replace('.', '/')}.py:{line})"
    return RowRejected(Reason.UNEXPECTED_ERROR, f"{type(error).__name__}: {error}{where}")
