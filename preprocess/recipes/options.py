"""Options of recipes: declared as a frozen dataclass, given by name as text or values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from vlmdata.errors import SourceError

#: Types with words as values.
_WORDS: Mapping[Any, tuple[Any, ...]] = {bool: (True, False), NoneType: (None,)}


@dataclass(frozen=True)
class NoOptions:
    """Options of a recipe without options."""


@dataclass(frozen=True)
class RecipeOption:
    """A declared option, for help and messages.

    Attributes:
        name: The field's name.
        type: Its type in words: ``text``, ``donut or json``.
        default: Default value, as on the command line; None if required.
        meaning: Description, from ``Annotated[type, meaning]``.
    """

    name: str
    type: str
    default: str | None
    meaning: str

    def __str__(self) -> str:
        default = "required" if self.default is None else f"default {self.default!r}"
        return f"{self.name}: {self.type}, {default}. {self.meaning}".rstrip()


def declared_options(options: type) -> list[RecipeOption]:
    """Returns the fields of an options dataclass, in order."""
    hints = get_type_hints(options, include_extras=True)
    return [
        RecipeOption(
            name=field.name,
            type=_in_words(_bare(hints[field.name])),
            default=_default(field),
            meaning=_meaning(hints[field.name]),
        )
        for field in dataclasses.fields(options)
    ]


def make_options(recipe: str, options: type, given: Mapping[str, Any], hint: str = "") -> Any:
    """Creates an instance of a recipe's options dataclass.

    Args:
        recipe: Name of the recipe, for messages.
        options: The dataclass. Fields may be str, bool, int, float, an Enum, a Literal, a tuple of these, or None.
        given: Options by name; text is converted to the field's type.
        hint: Text after the name of an unknown option.

    Raises:
        SourceError: If an option is unknown or missing, or a value has the wrong type.
    """
    known = declared_options(options)
    hints = get_type_hints(options)
    values = {}
    for name, value in given.items():
        if name not in hints:
            raise SourceError(
                f"--recipe-option {name}={value}: recipe {recipe} has no option {name}{hint}. {listed(recipe, known)}"
            )
        try:
            values[name] = _converted(hints[name], value)
        except (LookupError, ValueError, TypeError):
            raise SourceError(
                f"--recipe-option {name}={value}: it must be {_in_words(hints[name])}. {listed(recipe, known)}"
            ) from None
    if missing := [option.name for option in known if option.default is None and option.name not in values]:
        raise SourceError(f"--recipe {recipe}: give --recipe-option {missing[0]}=…. {listed(recipe, known)}")
    try:
        return options(**values)
    except ValueError as error:  # from the dataclass's own check
        raise SourceError(f"--recipe {recipe}, its options: {error}. {listed(recipe, known)}") from error


def listed(recipe: str, options: list[RecipeOption]) -> str:
    """Formats the options of a recipe, one line each."""
    if not options:
        return f"Recipe {recipe} has no options."
    return f"Options of recipe {recipe}:" + "".join(f"\n  {option}" for option in options)


def _converted(kind: Any, value: Any) -> Any:
    """Converts a value to a type. Text is parsed as on a command line.

    Raises:
        LookupError, ValueError, TypeError: If the value cannot be converted.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if value is None:
            return value
        for each in arguments:
            try:
                return _converted(each, value)
            except (LookupError, ValueError, TypeError):
                continue
        raise ValueError
    if origin is tuple:
        items = value.split(",") if isinstance(value, str) else value
        return tuple(_converted(arguments[0], item) for item in items)
    if origin is Literal:
        return arguments[[str(each) for each in arguments].index(str(value))]
    if kind in _WORDS:
        return {str(word).lower(): word for word in _WORDS[kind]}[str(value).lower()]
    if kind is str and not isinstance(value, str):
        raise TypeError
    made = kind(value)
    if kind is int and not isinstance(value, str) and (isinstance(value, bool) or made != value):
        raise ValueError
    return made


def _bare(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _meaning(kind: Any) -> str:
    remarks = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
    return next((remark for remark in remarks if isinstance(remark, str)), "")


def _in_words(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(_in_words(each) for each in arguments)
    if origin is tuple:
        return f"a list of {_in_words(arguments[0])}, separated by commas"
    if origin is Literal:
        return " or ".join(str(each) for each in arguments)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " or ".join(str(each.value) for each in kind)
    names = {str: "text", bool: "true or false", int: "a whole number", float: "a number", NoneType: "none"}
    return names.get(kind, getattr(kind, "__name__", str(kind)))


def _default(field: dataclasses.Field[Any]) -> str | None:
    if field.default_factory is not dataclasses.MISSING:
        value: Any = field.default_factory()
    elif field.default is not dataclasses.MISSING:
        value = field.default
    else:
        return None
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value.value if isinstance(value, Enum) else value)
