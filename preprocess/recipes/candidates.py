"""The result of a recipe for a row: one candidate or a numbered list, and error descriptions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from traceback import walk_tb
from typing import Any

from preprocess.conversation import Conversation, Document
from preprocess.recipes.base import Recipe
from preprocess.reject import RowRejected
from preprocess.row import Row
from vlmdata.reasons import Reason
from vlmdata.registry import shown_name
from vlmdata.wording import with_article

_WANTED = "a Conversation or Document"


@dataclass(frozen=True, eq=False)
class Candidate:
    """A candidate for a sample."""

    made: Conversation | Document | RowRejected  # result of the recipe, or its rejection of this list element
    sample: int | None = None  # number within the row's list; None without a list
    of: int = 1  # length of the list


def candidates_of(recipe: Recipe, row: Row) -> list[Candidate]:
    """Calls the recipe on a row.

    Args:
        recipe: The recipe.
        row: The row.

    Returns:
        One candidate without a number for a Conversation or Document; the numbered elements of a list, tuple or
        generator.

    Raises:
        RowRejected: As raised by the recipe; NO_SAMPLES for an empty list.
        TypeError: If the recipe returned something else.
    """
    made: Any = recipe(row)
    if isinstance(made, Conversation | Document):
        return [Candidate(made)]
    if not isinstance(made, list | tuple | Iterator):
        raise TypeError(f"the recipe returned {_described(made)}; it must return {_WANTED}, or a list of them")
    elements = list(made)
    if not elements:
        raise RowRejected(Reason.NO_SAMPLES, "the recipe returned an empty list")
    return [Candidate(_element(element, i), i, len(elements)) for i, element in enumerate(elements)]


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
