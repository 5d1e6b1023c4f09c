"""``vlmdata preprocess``: its options, as declared. Heavy imports wait until it runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from vlmdata.cli.declared_options import with_declared_options
from vlmdata.options import filled
from vlmdata.preprocess.cli.command import PreprocessCommand
from vlmdata.preprocess.config import PreprocessConfig


@with_declared_options(PreprocessCommand)
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

    - `vlmdata preprocess chats.jsonl --tokenizer my-model/ --chat-template-kwargs '{"add_vision_id": true}' --out data`

    - `vlmdata preprocess chats.jsonl --tokenizer Qwen/Qwen3.5-9B --trace 17`

    - `vlmdata preprocess chats.jsonl --tokenizer Qwen/Qwen3.5-9B --lengths 4096,8192,16384`

    - `vlmdata preprocess chats.jsonl --tokenizer Qwen/Qwen3.5-9B --out data/chat --part 3/16`

    - `vlmdata preprocess chats.jsonl --tokenizer Qwen/Qwen3.5-9B --out data/chat --engine ray --ray-address auto`

    **Exit codes**: 0 done; 1 done, but too many rows, all rows or the traced row rejected; 2 invalid
    options, source or configuration; 3 out of space or workers; 130 interrupted.
    """
    from vlmdata.preprocess.chat.template_arguments import parse_arguments
    from vlmdata.preprocess.cli.run_command import run_command
    from vlmdata.preprocess.own_options import describe_options
    from vlmdata.preprocess.registries import ENGINES, RECIPES

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
    kept = ",".join(values["keep_columns"] or ())
    values["keep_columns"] = tuple(name.strip() for name in kept.split(",")) if kept else ()
    kinds = ",".join(values["variant_kinds"] or PreprocessConfig.variant_kinds)
    values["variant_kinds"] = tuple(name.strip() for name in kinds.split(","))
    values["allow_private_host"] = tuple(values["allow_private_host"] or ())
    try:
        values["chat_template_kwargs"] = parse_arguments(values["chat_template_kwargs"] or "{}")
        for own in ("recipe_option", "engine_option"):
            values[own] = by_name(f"--{own.replace('_', '-')}", values[own] or [])
        command = replace(filled(PreprocessCommand, values), source=source, given=given)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if command.out is None and command.trace is None and command.lengths is None:
        raise typer.BadParameter("missing; give the dataset directory to make", param_hint="--out")
    raise typer.Exit(run_command(command))


def by_name(flag: str, options: list[str]) -> dict[str, str]:
    """Parses each ``NAME=VALUE`` of an option."""
    found: dict[str, str] = {}
    for option in options:
        name, separator, value = option.partition("=")
        if not separator or not name or name in found:
            raise ValueError(f"{flag} {option}: give each option once, as NAME=VALUE; {flag} help lists them")
        found[name] = value
    return found
