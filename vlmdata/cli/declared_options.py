"""Options of a command that are fields of a dataclass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, get_origin

import typer

from vlmdata.options import DeclaredOption, declared_fields


def with_declared_options(of: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds the options of a dataclass to the signature of a command that takes them as ``**values``.

    They come after the command's arguments and before its own options, in signature and help.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters.values()
        named = [each for each in own if each.kind is not inspect.Parameter.VAR_KEYWORD]
        own_options = [each for each in named if any(map(_is_option, getattr(each.annotation, "__metadata__", ())))]
        parameters = [each for each in named if each not in own_options]
        parameters += map(_parameter, declared_fields(of))
        parameters += [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own_options]
        return with_parameters(command, parameters)

    return decorate


def with_parameters(command: Callable[..., None], parameters: Sequence[inspect.Parameter]) -> Callable[..., None]:
    """Gives a command the signature from which typer makes its arguments and options."""
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def option_parameter(name: str, kind: Any, option: Any, default: Any = None) -> inspect.Parameter:
    """Returns the parameter of an option of a command; with the default None, it may be left out."""
    annotation: Any = Annotated[kind if default is not None else kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _is_option(declared: Any) -> bool:
    return isinstance(declared, typer.models.OptionInfo)


def _parameter(declared: DeclaredOption) -> inspect.Parameter:
    option, kind, default = declared.option, declared.kind, declared.default
    if get_origin(kind) in (tuple, Mapping):
        kind, default = list[str], None
    if get_origin(kind) is Literal:
        kind = str  # the dataclass refuses other values
    if option.typed is not None:
        kind, default = str, option.typed
    shown = typer.Option(
        *declared.flags,
        help=option.help,
        metavar=option.metavar,
        show_default=option.shown_default,
        rich_help_panel=option.panel,
    )
    return option_parameter(declared.name, kind, shown, default)
