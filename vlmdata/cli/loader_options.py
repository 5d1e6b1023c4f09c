"""The loader's options on the command line. Flags, help and defaults come from ``LoaderConfig``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, get_type_hints

import typer

from vlmdata.cli.declared_options import option_parameter, with_parameters
from vlmdata.errors import UsageError

if TYPE_CHECKING:
    from vlmdata.loader.run_record import LoaderChoice

#: Flags that are shorter than the option names.
_FLAGS = {"dp_size": "dp", "context_parallel": "cp", "tensor_parallel": "tp", "sequence_parallel": "sp"}
_PANELS = {"packing": "Packs and steps", "parallelism": "Parallel layout"}
#: Options that have another form here, or are of one rank.
_NOT_OFFERED = ("blend", "schedule", "earlier", "context_parallel_rank", "vision_ranks", "vision_rank")
#: Defaults, in words, of options that the loader requires but a command does not.
_FALLBACKS = {
    "capacity": "8192, or room for the longest sample",
    "global_batch": "one per rank",
    "dp_size": "1",
    "cost": "the 4b of the dataset's family",
    "sequence_parallel": "off",
}


def with_loader_options(*without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds the options that determine packs and steps, and ``--run``, to a command.

    The command receives them as one argument ``choice``, a :class:`vlmdata.loader.run_record.LoaderChoice`.

    Args:
        *without: Names of options to omit.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        types = get_type_hints(command, localns={"LoaderChoice": object}, include_extras=True)
        own = [
            each.replace(annotation=types[name])
            for name, each in inspect.signature(command).parameters.items()
            if name != "choice"
        ]
        offered = [each for each in _parameters() if each.name not in without]

        @wraps(command)
        def run_command(**values: Any) -> None:
            given = {each.name: values.pop(each.name) for each in offered}
            command(**values, choice=_choice({name: each for name, each in given.items() if each is not None}))

        return with_parameters(run_command, [*own, *offered])

    return decorate


def _parameters() -> list[inspect.Parameter]:
    """Returns one parameter per option. The default None means not given."""
    from vlmdata.loader.config import loader_options

    run = typer.Option(
        metavar="RUNDIR",
        help="Folder of a training run: use its data and options. Options given here override them.",
        rich_help_panel="A training run",
    )
    made = [option_parameter("run", str, run)]
    for option in loader_options().values():
        kind = next((kind for kind in (int, bool) if kind in option.kinds), str)
        if option.group not in _PANELS or option.name in _NOT_OFFERED:
            continue
        flag = f"--{_FLAGS.get(option.name, option.name).replace('_', '-')}"
        switch = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
        made.append(
            option_parameter(
                option.name,
                kind,
                typer.Option(
                    switch,
                    help=option.summary,
                    show_default=_default(option.name, option.default),
                    rich_help_panel=_PANELS[option.group],
                ),
            )
        )
    panel = "Several datasets"
    weights = typer.Option(metavar="W,…", help="One weight per dataset, e.g. 0.7,0.3.", rich_help_panel=panel)
    by = typer.Option(
        help="Meaning of weights: epochs, tokens, samples or targets.", show_default="tokens", rich_help_panel=panel
    )
    return [*made, option_parameter("weights", str, weights), option_parameter("weights_by", str, by)]


def _default(name: str, default: Any) -> str | bool:
    if name in _FALLBACKS:
        return _FALLBACKS[name]
    if isinstance(default, bool):
        return "on" if default else "off"
    return False if default is None else str(default)


def _choice(given: dict[str, Any]) -> LoaderChoice:
    from vlmdata.loader.run_record import LoaderChoice, RunRecord
    from vlmdata.packing.config import Blend

    run, weights, by = (given.pop(name, None) for name in ("run", "weights", "weights_by"))
    record = None if run is None else RunRecord.read(run)
    if weights is not None:
        given["blend"] = Blend(by or "tokens", _numbers(weights))
    elif by is not None:
        raise UsageError(f"--weights-by {by} without --weights: give one weight per dataset, e.g. --weights 0.7,0.3")
    return LoaderChoice(given, record)


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(weight) for weight in text.split(","))
    except ValueError:
        raise UsageError(f"--weights {text!r}: give comma-separated numbers, e.g. 0.7,0.3") from None
