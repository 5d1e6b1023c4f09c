"""Options as fields of frozen dataclasses, each with the text of its help. The command and the docs follow them."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from numbers import Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from vlmdata.errors import UsageError


def documentation(of: Any) -> str:
    """Returns the docstring of a class or function, from its source under ``python -OO``, which keeps none."""
    if sys.flags.optimize < 2:
        return inspect.getdoc(of) or ""
    try:
        (found,) = ast.parse(textwrap.dedent(inspect.getsource(of))).body
    except (OSError, SyntaxError, ValueError):  # installed without sources
        return ""
    assert isinstance(found, ast.ClassDef | ast.FunctionDef)
    return ast.get_docstring(found) or ""


@dataclass(frozen=True)
class OptionHelp:
    """Declares a field as an option: ``max_length: Annotated[int, OptionHelp("Largest number …", "Text")] = 8192``."""

    help: str  # what it does, in Markdown
    panel: str | None = None  # its heading on the help page; None for options without one
    name: str | None = None  # its name on the command line; None for the field's
    flags: tuple[str, ...] = ()  # its flags; by default the name
    metavar: str | None = None  # stands for its value on the help page; None for the type
    shown_default: str | bool = True  # stands for the default on the help page; True for the value, False for nothing
    least: float | None = None  # its smallest value
    above: float | None = None  # what its values are more than
    below: float | None = None  # what they are less than
    unit: str = ""  # of these
    typed: str | None = None  # the default as text, of an option whose text the command parses: ``4G``

    def outside(self, value: float) -> str:
        """Returns the bound that a number is not within, in words: ``at least 1``; empty if it is within all."""
        unit = self.unit and f" {self.unit}"
        if self.least is not None and not value >= self.least:
            return f"at least {self.least:g}{unit}"
        if self.above is not None and not value > self.above:
            return f"more than {self.above:g}{unit}"
        if self.below is not None and not value < self.below:
            return f"below {self.below:g}{unit}"
        return ""


@dataclass(frozen=True)
class DeclaredOption:
    """An option of a dataclass, or of a dataclass in it."""

    name: str  # its name on the command line
    kind: Any  # type of its values
    default: Any  # its default; ``inspect.Parameter.empty`` if it is required
    option: OptionHelp  # its declaration

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The types of its values, one by one."""
        return _kinds(self.kind)

    @property
    def flags(self) -> tuple[str, ...]:
        """Its flags, the long one first."""
        return self.option.flags or (f"--{self.name.replace('_', '-')}",)


def declared_fields(of: type[Any]) -> Iterator[DeclaredOption]:
    """Yields the options of a dataclass in order, with those of the dataclasses in it."""
    hints = get_type_hints(of, include_extras=True)
    for field in fields(of):
        hint = hints[field.name]
        if isinstance(hint, type) and is_dataclass(hint):
            yield from declared_fields(hint)
        elif (option := _option(hint)) is not None:
            default = field.default if field.default_factory is MISSING else field.default_factory()
            default = inspect.Parameter.empty if default is MISSING else default
            yield DeclaredOption(option.name or field.name, get_args(hint)[0], default, option)


def filled[T](of: type[T], values: Mapping[str, Any]) -> T:
    """Creates a dataclass, and those in it, from the values of all options by name.

    Raises:
        ValueError: As the dataclasses do, for invalid values.
    """
    hints, made = get_type_hints(of, include_extras=True), {}
    for field in fields(of):  # type: ignore[arg-type]
        hint = hints[field.name]
        if isinstance(hint, type) and is_dataclass(hint):
            made[field.name] = filled(hint, values)
        elif (option := _option(hint)) is not None:
            made[field.name] = values[option.name or field.name]
    return of(**made)


def require_valid(made: Any) -> None:
    """Checks the types, choices and bounds that the fields of a dataclass declare, as its constructor does not.

    Values may be text of the environment. Of the types, integers, numbers, bools and literals are checked.

    Raises:
        UsageError: Naming the first field with another value.
    """
    for name, kinds, option in _checked(type(made)):  # type: ignore[arg-type]  # a class is hashable
        value = getattr(made, name)
        if value is None and NoneType in kinds:
            continue
        if wanted := _unfit(value, kinds, option):
            raise UsageError(f"{name} is {value!r}; it must be {wanted}")


@cache
def _checked(of: type[Any]) -> tuple[tuple[str, tuple[Any, ...], OptionHelp], ...]:
    """Returns name, types and declaration of each option among the fields of a dataclass."""
    hints = get_type_hints(of, include_extras=True)
    return tuple(
        (field.name, _kinds(get_args(hints[field.name])[0]), option)
        for field in fields(of)
        if (option := _option(hints[field.name])) is not None
    )


def _kinds(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _unfit(value: Any, kinds: tuple[Any, ...], option: OptionHelp) -> str:
    """Returns what a value must be; empty if it is that."""
    choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    # numpy's integers count as integers, and 0 and 1 as bools. A bool is no number.
    if choices and value not in choices and not (bool in kinds and isinstance(value, bool)):
        return f"one of {', '.join(choices)}"
    if int in kinds and (isinstance(value, bool) or not hasattr(value, "__index__")):
        return "an integer"
    if float in kinds and (isinstance(value, bool) or not isinstance(value, Real)):
        return "a number"
    if not choices and bool in kinds and value not in (False, True):
        return "True or False"
    return option.outside(value)


def option_table(of: type[Any], *, flags: bool = True) -> str:
    """Returns the options of a dataclass as a Markdown table, for the docs: by flags, or by their names in Python."""
    rows = ["| option | default | meaning |", "|---|---|---|"]
    rows += [
        f"| `{each.flags[0] if flags else each.name}` | {_shown_default(each)} | {each.option.help} |"
        for each in declared_fields(of)
    ]
    return "\n".join(rows)


def _shown_default(each: DeclaredOption) -> str:
    shown = each.option.shown_default
    if isinstance(shown, str):
        return shown
    if each.default is inspect.Parameter.empty:
        return "required"
    return "" if not shown or each.default is None else f"`{each.default}`"


def _option(hint: Any) -> OptionHelp | None:
    """Returns what a field's type is annotated with; a text alone is the help."""
    declared = next((each for each in getattr(hint, "__metadata__", ()) if isinstance(each, OptionHelp | str)), None)
    return OptionHelp(declared) if isinstance(declared, str) else declared
