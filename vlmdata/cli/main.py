"""The ``vlmdata`` command and its sub-commands, which are loaded on use."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

import typer
from typer.core import TyperGroup

from vlmdata.errors import ResourceError, VlmdataError
from vlmdata.options import documentation
from vlmdata.registry import Registry, not_callable
from vlmdata.version import __version__

#: Exit codes, also in the README: done; done, but the data failed a check; the command could not run; out of space or
#: workers; interrupted.
EXIT_OK, EXIT_FAILED_CHECK, EXIT_USAGE, EXIT_RESOURCES, EXIT_INTERRUPTED = 0, 1, 2, 3, 130

#: The built-in commands, in the order of the help. A table, and no entry points: those are read when a package is
#: installed, so a command that is added to an installed checkout, or renamed, would not be found.
COMMANDS = Registry[Callable[..., None]](
    "command",
    "vlmdata.commands",
    "vlmdata",
    not_callable,
    {
        "preprocess": "vlmdata.preprocess.cli.preprocess:preprocess",
        "finish": "vlmdata.preprocess.cli.finish:finish",
        "join": "vlmdata.cli.join:join",
        "select": "vlmdata.cli.select:select",
        "diff": "vlmdata.cli.diff:diff",
        "verify": "vlmdata.cli.verify:verify",
        "inspect": "vlmdata.cli.inspect:inspect",
        "plan": "vlmdata.cli.plan:plan",
        "serve": "vlmdata.cli.serve:serve",
        "recode": "vlmdata.preprocess.cli.recode:recode",
        "retokenize": "vlmdata.preprocess.cli.retokenize:retokenize",
        "train": "vlmdata.train:train",
        "convert": "vlmdata.model.weights.command:convert",
        "check-model": "vlmdata.cli.check_model:check_model",
        "prune": "vlmdata.cli.prune:prune",
    },
)

#: Commands that continue where an interrupted one ended.
_CONTINUING = (["preprocess"], ["join"], ["select"], ["recode"], ["retokenize"])


class _Interrupted(Exception):
    """Ctrl-C. typer itself would exit silently."""


class _Commands(TyperGroup):
    """The commands: built in, of other packages, or the user's as ``file.py:function``. Each is imported on use."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise _Interrupted from None

    def list_commands(self, ctx: Any) -> list[str]:
        return COMMANDS.names()

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if ":" not in cmd_name and not COMMANDS.knows(cmd_name):
            return None
        command = COMMANDS.find(cmd_name)
        single = typer.Typer(add_completion=False, rich_markup_mode="markdown", context_settings=_HELP)
        single.command(cmd_name, help=documentation(command))(command)
        return typer.main.get_command(single)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        known = self.list_commands(ctx)
        if ":" not in args[0] and args[0] not in known and not args[0].startswith("-"):
            close = get_close_matches(args[0], known, n=1)
            remedy = f"Did you mean {close[0]}?" if close else f"Commands: {', '.join(known)}."
            ctx.fail(f"No such command {args[0]!r}. {remedy}")
        return super().resolve_command(ctx, args)


_HELP = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    context_settings=_HELP,
    help="Packed vision-language training data: prepare once, verify, and stream to GPUs.",
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"vlmdata {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    pass


def main() -> None:
    """Entry point of the console script. Converts errors of this project to a message and an exit code."""
    try:
        app()
    except VlmdataError as error:
        _fail(str(error), EXIT_RESOURCES if isinstance(error, ResourceError) else EXIT_USAGE)
    except (KeyboardInterrupt, _Interrupted):
        continues = sys.argv[1:2] in _CONTINUING
        _fail(
            "interrupted" + ("; finished work is kept, and the same command continues" if continues else ""),
            EXIT_INTERRUPTED,
        )
    except BrokenPipeError:  # `vlmdata … | head` is not an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_OK)


def _fail(message: str, code: int) -> None:
    from rich.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
    console.print("error:", style="bold red", end=" ")
    console.print(message, markup=False)
    sys.exit(code)
