"""``vlmdata preprocess``: its options, as declared. Heavy imports wait until it runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, get_origin

import typer

from preprocess.config import PreprocessConfig
from preprocess.options import DeclaredOption, OptionHelp, data_option, declared_fields, filled, run_option


@dataclass(frozen=True)
class PreprocessCommand:
    """What a command line asks for."""

    out: Annotated[
        str | None,
        OptionHelp(
            "Dataset to make or continue: a folder, or s3://, gs:// or az:// of one in a bucket. Required, except "
            "with --trace.",
            flags=("--out", "-o"),
        ),
    ] = None
    split: Annotated[
        str | None,
        data_option(
            "Split to read. Default: train, or the only one. Several, as in `train,validation`, make one dataset "
            "each, in folders of --out."
        ),
    ] = None
    subset: Annotated[str | None, data_option("Configuration of a hub dataset.")] = None
    revision: Annotated[str | None, data_option("Branch, tag or commit of a hub dataset.")] = None
    limit: Annotated[int | None, data_option("Read only this many rows, from the first (demo: draw this many).")] = None
    holdout: Annotated[
        float | None,
        data_option(
            "Hold out this share of the rows, such as 0.02, chosen by a hash of their content. Makes datasets "
            "`train` and `validation` in --out."
        ),
    ] = None
    #: Options that affect the bytes; its recipe, tokenizer and family count only if the user gave them.
    config: PreprocessConfig = field(default_factory=PreprocessConfig)
    workers: Annotated[
        int | None, run_option("Workers. Default: one per core (of the cluster, with Ray).", flags=("--workers", "-j"))
    ] = None
    engine: Annotated[
        str,
        run_option(
            "What makes the shards: `local` (processes of this machine), `ray` (a Ray cluster), or your own as "
            "`module:attribute` or `file.py:attribute`."
        ),
    ] = "local"
    engine_option: Annotated[
        Mapping[str, Any],
        run_option(
            "Option of the engine; repeat for several. `local`: reject_after_deaths. `ray`: address. "
            "`--engine-option help` describes them, also for your own --engine.",
            metavar="NAME=VALUE",
            shown_default=False,
        ),
    ] = field(default_factory=dict)
    ray_address: Annotated[
        str | None,
        run_option("Short for --engine-option address=…: the cluster, such as 10.0.0.1:6379 or auto."),
    ] = None
    reject_after_deaths: Annotated[
        int | None,
        run_option(
            "Short for --engine-option reject_after_deaths=N: reject a row, as `worker_died`, after it has ended N "
            "worker processes (out of memory, or a crash in a library). Default: the fifth death ends the run and "
            "names the row.",
            metavar="N",
        ),
    ] = None
    part: Annotated[
        str | None,
        run_option(
            "Make every N-th shard only, from the K-th, and no manifest; `vlmdata finish` closes the dataset when "
            "all parts are made.",
            metavar="K/N",
        ),
    ] = None
    max_reject_rate: Annotated[
        float, run_option("Exit with code 1 if a larger share of the rows is rejected, not counting rows of weight 0.")
    ] = 0.01
    overwrite: Annotated[bool, run_option("Remove a dataset in --out and start over.")] = False
    hash_source: Annotated[
        bool,
        run_option(
            "Know the source's files by their bytes, not by footers, times or a bucket's checksums; and when "
            "continuing, read all image files of finished shards, not only those touched since."
        ),
    ] = False
    trace: Annotated[
        int | None,
        run_option(
            "Write nothing; show the recipe's and tokenizer's result for this row, or the traceback.", metavar="ROW"
        ),
    ] = None
    as_json: Annotated[
        bool,
        run_option("Print the summary as JSON on stdout, and progress as lines of JSON on stderr.", flags=("--json",)),
    ] = False
    source: str = "demo"
    given: frozenset[str] = frozenset()  # names of the options that the user gave

    @property
    def engine_options(self) -> dict[str, Any]:
        """The engine's own options, with those that have an option of the command as a short form."""
        short = {"address": self.ray_address, "reject_after_deaths": self.reject_after_deaths}
        given = {name: str(value) for name, value in short.items() if value is not None}
        if twice := given.keys() & self.engine_option.keys():
            raise ValueError(f"--engine-option {min(twice)}: given twice, also by its short form")
        return {**self.engine_option, **given}

    def __post_init__(self) -> None:
        _ = self.engine_options  # refuses one that is given twice
        if self.config.media.private_hosts and not self.config.media.allow_urls:
            raise ValueError("--allow-private-host has no effect without --allow-urls")
        if not 0 <= self.max_reject_rate <= 1:
            raise ValueError(f"max_reject_rate is {self.max_reject_rate}; it must be between 0 and 1")
        if self.holdout is not None and not 0 < self.holdout < 1:
            raise ValueError(f"holdout is {self.holdout}; it must be between 0 and 1")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers is {self.workers}; it must be at least 1")
        if self.trace is not None and self.as_json:
            raise ValueError("--trace prints text; omit --json")
        if self.part is not None and self.trace is not None:
            raise ValueError("--trace shows one row and makes no shards; omit --part")
        if self.part is not None and self.overwrite:
            raise ValueError("--overwrite would remove the shards of other parts; omit it, or remove the folder")


def _with_declared_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of :class:`PreprocessCommand` to the signature of a command that takes them as ``**values``."""
    own = inspect.signature(command, eval_str=True).parameters.values()
    named = [each for each in own if each.kind is not inspect.Parameter.VAR_KEYWORD]
    parameters = [*named, *map(_parameter, declared_fields(PreprocessCommand))]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def _parameter(declared: DeclaredOption) -> inspect.Parameter:
    option, kind, default = declared.option, declared.kind, declared.default
    if get_origin(kind) in (tuple, Mapping):
        kind, default = list[str] | None, None
    shown = typer.Option(
        *declared.flags,
        help=option.help,
        metavar=option.metavar,
        show_default=option.shown_default,
        rich_help_panel=option.panel,
    )
    annotation: Any = Annotated[kind, shown]
    return inspect.Parameter(declared.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


@_with_declared_options
def preprocess(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            help="`demo`, a hub dataset id, a parquet/arrow/JSONL/CSV file or WebDataset tar, a folder of them (all "
            "of these also as s3://, gs://, az://, hf:// or https://), or a save_to_disk folder."
        ),
    ] = PreprocessCommand.source,
    moved: Annotated[list[str] | None, typer.Option("--prompt", "--target", "--stray-marks", hidden=True)] = None,
    **values: Any,
) -> None:
    """Convert rows of images and text to tokenized samples in shards, ready for packing.

    A recipe converts each row to a conversation or document. Without `--recipe`, the source's columns select it.
    Options without effect are errors. Repeat the command to continue an interrupted run or to recreate lost files of a
    finished dataset. The result is byte-identical for any number of workers and any interruption.

    **Examples**

    - `vlmdata preprocess demo --out build/demo`

    - `vlmdata preprocess naver-clova-ix/cord-v2 --split train --tokenizer Qwen/Qwen3.5-9B --out data/cord`

    - `vlmdata preprocess chats.jsonl --image-root images/ --tokenizer Qwen/Qwen3.5-9B --out data/chat -j 8`

    - `vlmdata preprocess chats.jsonl --tokenizer Qwen/Qwen3.5-9B --holdout 0.02 --out data/chat`

    - `vlmdata preprocess chats.jsonl --tokenizer Qwen/Qwen3.5-9B --trace 17`

    - `vlmdata preprocess chats.jsonl --tokenizer Qwen/Qwen3.5-9B --out data/chat --part 3/16`

    - `vlmdata preprocess chats.jsonl --tokenizer Qwen/Qwen3.5-9B --out data/chat --engine ray --ray-address auto`

    **Exit codes**: 0 done; 1 done, but too many rows, all rows or the traced row rejected; 2 invalid
    options, source or configuration; 3 out of space or workers; 130 interrupted.
    """
    from preprocess.cli.run_command import run_command
    from preprocess.engines.base import REGISTRY as ENGINES
    from preprocess.own_options import describe_options
    from preprocess.recipes.base import REGISTRY as RECIPES

    if moved:
        raise typer.BadParameter(
            "--prompt, --target and --stray-marks are options of recipes: write -O prompt=…, -O target=… or "
            "-O stray_marks=…"
        )
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = frozenset(name for name, how in sources.items() if how is not None and how.name != "DEFAULT")
    for own, owner, registry in (("recipe_option", "recipe", RECIPES), ("engine_option", "engine", ENGINES)):
        if "help" in (values[own] or []):
            print(describe_options(registry, [values[owner]] if owner in given else None))
            raise typer.Exit
    values["allow_private_host"] = tuple(values["allow_private_host"] or ())
    try:
        for own in ("recipe_option", "engine_option"):
            values[own] = _by_name(f"--{own.replace('_', '-')}", values[own] or [])
        command = replace(filled(PreprocessCommand, values), source=source, given=given)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if command.out is None and command.trace is None:
        raise typer.BadParameter("missing; give the dataset directory to make", param_hint="--out")
    raise typer.Exit(run_command(command))


def _by_name(flag: str, options: list[str]) -> dict[str, str]:
    """Parses each ``NAME=VALUE`` of an option."""
    found: dict[str, str] = {}
    for option in options:
        name, separator, value = option.partition("=")
        if not separator or not name or name in found:
            raise ValueError(f"{flag} {option}: give each option once, as NAME=VALUE; {flag} help lists them")
        found[name] = value
    return found
