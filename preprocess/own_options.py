"""Makes recipes and engines with their own options: a frozen dataclass, given by name as text or values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from inspect import Parameter, signature
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from vlmdata.errors import VlmdataError
from vlmdata.registry import Registry, problem_of
from vlmdata.wording import either

#: Types with words as values.
_WORDS: Mapping[Any, tuple[Any, ...]] = {bool: (True, False), NoneType: (None,)}


@dataclass(frozen=True)
class NoOptions:
    """Options of a recipe or engine without options."""


@dataclass(frozen=True)
class OwnOption:
    """A declared option, for help and messages."""

    name: str  # the field's name
    type: str  # its type in words: ``text``, ``donut or json``
    default: str | None  # default value, as on the command line; None if required
    meaning: str  # description, from ``Annotated[type, meaning]``

    def __str__(self) -> str:
        default = "required" if self.default is None else f"default {self.default!r}"
        return f"{self.name}: {self.type}, {default}. {self.meaning}".rstrip()


def make_own(registry: Registry[Any], name: str, given: Mapping[str, Any], parts: Mapping[str, Any]) -> Any:
    """Makes a recipe or an engine.

    Args:
        registry: Finds it.
        name: Its name, ``module:attribute`` or ``file.py:attribute``.
        given: Its options by name, as text or values; omitted options have their defaults.
        parts: What else its constructor may take, by name.

    Raises:
        SourceError: If it is unknown or cannot be made, or the options are invalid.
    """
    made, taken, where = registry.find(name), constructor_takes(registry, name, parts), f"{registry.option} {name}"
    if "options" not in taken and options_class(registry, name) is not NoOptions:
        raise registry.error(f"{where}: it declares Options, but its constructor does not take `options`")
    passed = {"options": make_options(registry, name, given), **parts}
    try:
        return made(**{part: value for part, value in passed.items() if part in taken})
    except VlmdataError:
        raise
    except Exception as error:  # the constructor is the user's
        raise registry.error(f"{where}: its constructor failed: {problem_of(error, str(made.__module__))}") from error


def constructor_takes(registry: Registry[Any], name: str, parts: Iterable[str]) -> frozenset[str]:
    """Returns which of ``options`` and ``parts`` a constructor takes.

    Raises:
        SourceError: If it needs other arguments.
    """
    known = ("options", *parts)
    parameters = signature(registry.find(name)).parameters.values()
    fixed = [each for each in parameters if each.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)]
    for each in fixed:
        if each.name not in known and each.default is Parameter.empty:
            raise registry.error(
                f"{registry.option} {name}: its constructor needs `{each.name}`. It may take "
                f"{', '.join(f'`{part}`' for part in known)} (docs/extend/{registry.kind}.md)."
            )
    return frozenset({each.name for each in fixed}.intersection(known))


def options_class(registry: Registry[Any], name: str) -> type:
    """Returns the dataclass of the options of a recipe or engine.

    Raises:
        SourceError: If there is none of this name, or they are no dataclass.
    """
    declared: type = getattr(registry.find(name), "Options", NoOptions)
    if not dataclasses.is_dataclass(declared):
        raise registry.error(
            f"{registry.option} {name}: its Options must be a frozen dataclass: write @dataclass(frozen=True)."
        )
    return declared


def describe_options(registry: Registry[Any], names: Iterable[str] | None = None) -> str:
    """Describes the options of recipes or engines, one line each; by default of all built-in ones."""
    return "\n".join(_listed(registry, name) for name in names or registry)


def declared_options(options: type) -> list[OwnOption]:
    """Returns the fields of an options dataclass, in order."""
    types, hints = get_type_hints(options), get_type_hints(options, include_extras=True)
    found = []
    for field in dataclasses.fields(options):
        meaning = next((each for each in getattr(hints[field.name], "__metadata__", ()) if isinstance(each, str)), "")
        found.append(OwnOption(field.name, _in_words(types[field.name]), _default(field), meaning))
    return found


def make_options(registry: Registry[Any], name: str, given: Mapping[str, Any]) -> Any:
    """Creates an instance of the ``Options`` of a recipe or engine.

    Its fields may be str, bool, int, float, an Enum, a Literal, a tuple of these, or None. Text is converted to them.

    Raises:
        SourceError: If an option is unknown or missing, or a value has the wrong type.
    """
    options, flag, kind = options_class(registry, name), f"{registry.option}-option", registry.kind
    known, hints = declared_options(options), get_type_hints(options)
    values = {}
    for option, value in given.items():
        if option not in hints:
            raise registry.error(
                f"{flag} {option}={value}: {kind} {name} has no option {option}{_others(registry, given)}. "
                f"{_listed(registry, name)}"
            )
        try:
            values[option] = _converted(hints[option], value)
        except (LookupError, ValueError, TypeError):
            raise registry.error(
                f"{flag} {option}={value}: it must be {_in_words(hints[option])}. {_listed(registry, name)}"
            ) from None
    if missing := [option.name for option in known if option.default is None and option.name not in values]:
        raise registry.error(f"{registry.option} {name}: give {flag} {missing[0]}=…. {_listed(registry, name)}")
    try:
        return options(**values)
    except ValueError as error:  # from the dataclass's own check
        raise registry.error(f"{registry.option} {name}, its options: {error}. {_listed(registry, name)}") from error


def _others(registry: Registry[Any], given: Iterable[str]) -> str:
    """Names the built-in ones that have all of these options; empty if there is none."""
    declared = {name: {field.name for field in dataclasses.fields(options_class(registry, name))} for name in registry}
    others = [name for name, names in declared.items() if names.issuperset(given)]
    return f" ({registry.option} {either(others)} has it)" if others else ""


def _listed(registry: Registry[Any], name: str) -> str:
    if not (options := declared_options(options_class(registry, name))):
        return f"{registry.kind.capitalize()} {name} has no options."
    return f"Options of {registry.kind} {name}:" + "".join(f"\n  {option}" for option in options)


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
