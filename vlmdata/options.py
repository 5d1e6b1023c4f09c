"""Options as fields of frozen dataclasses, each with the text of its help. The command and the docs follow them."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, get_args, get_type_hints


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
    typed: str | None = None  # the default as text, of an option whose text the command parses: ``4G``


@dataclass(frozen=True)
class DeclaredOption:
    """An option of a dataclass, or of a dataclass in it."""

    name: str  # its name on the command line
    kind: Any  # type of its values
    default: Any  # its default
    option: OptionHelp  # its declaration

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


def option_table(of: type[Any]) -> str:
    """Returns the options of a dataclass as a Markdown table, for the docs."""
    rows = ["| option | default | meaning |", "|---|---|---|"]
    rows += [f"| `{each.flags[0]}` | {_shown_default(each)} | {each.option.help} |" for each in declared_fields(of)]
    return "\n".join(rows)


def _shown_default(each: DeclaredOption) -> str:
    shown = each.option.shown_default
    if isinstance(shown, str):
        return shown
    return "" if not shown or each.default is None else f"`{each.default}`"


def _option(hint: Any) -> OptionHelp | None:
    return next((each for each in getattr(hint, "__metadata__", ()) if isinstance(each, OptionHelp)), None)
