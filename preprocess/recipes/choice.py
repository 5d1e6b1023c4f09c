"""Chooses a recipe by the columns of a source, and detects early if a given one does not fit."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import islice

from vlmdata.errors import SourceError
from vlmdata.preprocess.config import PreprocessConfig
from vlmdata.preprocess.recipes.base import Recipe, candidates_of, load_recipe
from vlmdata.preprocess.recipes.context import RecipeContext
from vlmdata.preprocess.recipes.keys import fitting
from vlmdata.preprocess.recipes.media import MediaLoader
from vlmdata.preprocess.registries import RECIPES
from vlmdata.preprocess.reject import RowRejected, excerpt
from vlmdata.preprocess.row import Row
from vlmdata.preprocess.sources.rows import Source
from vlmdata.wording import counted, either

#: Number of rows to search for columns if rows differ, and number of rows to test a recipe on.
_READ_ROWS, _TRIED_ROWS = 100, 8


def choose_recipe(source: Source, spec: str) -> str:
    """Returns the name of the only recipe that fits the source's columns.

    Raises:
        SourceError: If no recipe fits, or several do.
    """
    columns = columns_of(source)
    if not columns:
        raise SourceError(
            f"SOURCE {spec}: no recipe can be chosen, as none of the first rows can be read: {_first_fault(source)}"
        )
    names = recipes_for(columns)
    if len(names) == 1:
        return names[0]
    found = f"several recipes fit ({', '.join(names)})" if names else "no built-in recipe fits"
    needs = "; ".join(f"{name} needs {_needs(name)}" for name in names or RECIPES)
    own = "" if names else "; or write one of your own and give it as module:attribute"
    raise SourceError(
        f"SOURCE {spec}: {found} its columns, {', '.join(columns)}. Choose one with --recipe: {needs}{own}."
    )


def recipes_for(columns: Collection[str], name: str | None = None) -> list[str]:
    """Returns the recipes that rows with these columns are meant for, of those that declare what they take.

    Args:
        columns: Those of the rows.
        name: A recipe to compare, besides the built-in ones and those that the user gave in the environment.
    """
    takes = {known: getattr(RECIPES.named(known), "takes", ()) for known in RECIPES.trusted()}
    if name is not None:
        takes[name] = getattr(RECIPES.find(name), "takes", ())
    return fitting(takes, columns)


def recipe_for(source: Source, config: PreprocessConfig, media: MediaLoader | None = None) -> Recipe:
    """The config's recipe, with what loads its images; ``media`` of None makes that."""
    media = media or media_for(source, config)
    return load_recipe(config.recipe, config.recipe_options, media, RecipeContext.of(config))


def media_for(source: Source, config: PreprocessConfig) -> MediaLoader:
    """What loads images; their paths are relative to the source's folder where the config names none."""
    return MediaLoader(image_root_of(source, config), config.media.allow_urls, config.media.private_hosts)


def image_root_of(source: Source, config: PreprocessConfig) -> str | None:
    """Folder or URL that image paths are relative to: the one that the user named, or the source's."""
    named = config.media.image_root
    return source.image_root if named is None else named


def misfit(source: Source, spec: str, config: PreprocessConfig) -> str | None:
    """Returns why the given recipe does not fit this source; None if it may fit.

    A recipe may read more columns than it fits, so it must also reject each of the first rows.

    Raises:
        SourceError: If later rows have the same columns, so that none can succeed.
    """
    name = config.recipe
    columns = columns_of(source)
    if not hasattr(RECIPES.find(name), "takes") or not columns or name in recipes_for(columns, name):
        return None
    recipe, rejections = recipe_for(source, config), []
    for row in islice(_readable_rows(source), _TRIED_ROWS):
        try:
            made = [candidate.made for candidate in candidates_of(recipe, row)]
        except RowRejected as rejected:
            made = [rejected]
        except Exception:  # the run reports faults in the recipe row by row
            return None
        if not all(isinstance(each, RowRejected) for each in made):
            return None
        rejections.append(f"row {row.number}: {made[0]}")
    why = (
        f"--recipe {name} needs {_needs(name)}; SOURCE {spec} has the columns {', '.join(columns)}. "
        f"It rejects the first {counted(len(rejections), 'row')}: {rejections[0]}"
    )
    if source.rows.columns() is not None or source.num_rows <= _READ_ROWS:
        raise SourceError(why)
    return why


def _needs(name: str) -> str:
    """Returns the columns that a recipe needs, in its words or by their names."""
    recipe = RECIPES.find(name)
    forms = [" and ".join(either(group) for group in form.needs) for form in getattr(recipe, "takes", ())]
    return getattr(recipe, "needs", None) or either(forms)


def first_rows(sources: Iterable[Source]) -> str:
    """Returns "of the first rows" in words, with a space before it, if only those of a source tell its columns."""
    partly = any(source.rows.columns() is None and source.num_rows > _READ_ROWS for source in sources)
    return f" of the first {_READ_ROWS} rows" if partly else ""


def other_form(name: str, source: Source, row: Row) -> str:
    """Says for a rejection that a row of a source whose rows differ is meant for another recipe; empty if it is not."""
    if not hasattr(RECIPES.find(name), "takes") or source.rows.columns() is not None:
        return ""
    columns = tuple(key for key, value in row.values.items() if value is not None)
    others = recipes_for(columns, name)
    if not others or name in others:
        return ""
    return (
        f"; the row is of another form: its columns, {excerpt(', '.join(columns))}, are meant for recipe "
        f"{' or '.join(others)}, not {name}. Put such rows in a source of their own"
    )


def columns_of(source: Source) -> tuple[str, ...]:
    """Returns the source's columns; if rows differ, those of the first readable rows."""
    columns = source.rows.columns()
    if columns is not None:
        return columns
    return tuple(dict.fromkeys(name for row in _readable_rows(source) for name in row.values))


def _readable_rows(source: Source) -> Iterator[Row]:
    for number in source.numbers[:_READ_ROWS]:
        try:
            yield source.row(number)
        except RowRejected:
            continue


def _first_fault(source: Source) -> str:
    number = source.numbers[0]
    try:
        source.row(number)
    except RowRejected as rejected:
        return f"row {number}: {rejected}"
    return f"row {number} has no columns"
