"""``vlmdata retokenize``: options, progress and summary."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlmdata.preprocess.config import Overlong, SpecialText, TrainThink, TrainTurns

if TYPE_CHECKING:
    from vlmdata.preprocess.config import PreprocessConfig
    from vlmdata.preprocess.sources.rows import Source

_SAME = "Default: as the dataset has it."
_TEXT, _DATA, _RUN = "Text and targets", "Data", "Run"


def _text(help: str, *flags: str, **more: Any) -> Any:
    return typer.Option(*flags, help=f"{help} {_SAME}", rich_help_panel=_TEXT, show_default=False, **more)


def _data(help: str, *flags: str, **more: Any) -> Any:
    return typer.Option(*flags, help=help, rich_help_panel=_DATA, show_default=False, **more)


def retokenize(
    data: Annotated[str, typer.Argument(metavar="DIR", help="A finished dataset: a folder or fsspec URL.")],
    out: Annotated[str, typer.Option("--out", "-o", help="Dataset to make or continue.")],
    tokenizer: Annotated[
        str | None, _text("Tokenizer with its chat template: hub id or folder, of a model of the same family.")
    ] = None,
    tokenizer_revision: Annotated[str | None, _text("Branch, tag or commit of a hub tokenizer.")] = None,
    system_prompt: Annotated[str | None, _text("Begins conversations without a system turn; empty for none.")] = None,
    chat_template_kwargs: Annotated[
        str | None, _text("Arguments of the chat template; `{}` for none.", metavar="JSON")
    ] = None,
    train_turns: Annotated[TrainTurns | None, _text("Which assistant turns are learned.")] = None,
    train_think: Annotated[TrainThink | None, _text("Whether think blocks are learned.")] = None,
    max_length: Annotated[int | None, _text("Largest number of tokens in a sample.")] = None,
    overlong: Annotated[Overlong | None, _text("Handling of longer samples.")] = None,
    special_text: Annotated[SpecialText | None, _text("Handling of text of special tokens in data.")] = None,
    strict: Annotated[
        bool | None,
        _text("Reject rows with unknown keys, or with reasoning that the template drops.", "--strict/--no-strict"),
    ] = None,
    pad_multiple: Annotated[int | None, _text("Pad stored lengths to multiples of this.")] = None,
    source: Annotated[
        str | None,
        _data("Source of the dataset, to read the rows again. Needed unless it has --keep-conversations."),
    ] = None,
    split: Annotated[str | None, _data("Split of the source, as it was given then.")] = None,
    subset: Annotated[str | None, _data("Configuration of a hub dataset, as it was given then.")] = None,
    revision: Annotated[str | None, _data("Commit of a hub dataset.")] = None,
    reader: Annotated[str | None, _data("Reader of the source's files, as it was given then.")] = None,
    limit: Annotated[int | None, _data("Number of first rows, as it was given then.")] = None,
    hash_source: Annotated[bool, _data("Know the source's files by their bytes, if it was given then.")] = False,
    image_root: Annotated[
        str | None, _data("Where image paths begin now, if that is not where the dataset's options say.")
    ] = None,
    recipe_option: Annotated[
        list[str] | None,
        _data("Option of the recipe; the others stay. Needs --source.", "--recipe-option", "-O", metavar="NAME=VALUE"),
    ] = None,
    keep_rejected: Annotated[
        bool, _data("Without --source: leave out the rows that the dataset rejected, with their reasons.")
    ] = False,
    workers: Annotated[
        int | None, typer.Option("--workers", "-j", help="Processes. Default: one per core.", rich_help_panel=_RUN)
    ] = None,
    max_reject_rate: Annotated[
        float, typer.Option(help="Exit with code 1 if a larger share of the rows is rejected.", rich_help_panel=_RUN)
    ] = 0.01,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Remove a dataset in --out and start over.", rich_help_panel=_RUN)
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON on stdout.", rich_help_panel=_RUN)
    ] = False,
) -> None:
    """Make a dataset again with another tokenizer, chat template, system prompt or choice of targets.

    Pixels are taken from the shards as they are stored; no image is decoded. With equal library versions, the result is
    byte-identical to that of `vlmdata preprocess` with these options. Conversations come from the source (`--source`),
    or from the shards if the dataset was made with `--keep-conversations`. Repeat the command to continue.

    **Examples**

    - `vlmdata retokenize data/chat --tokenizer Qwen/Qwen3.5-27B --out data/chat-27b`

    - `vlmdata retokenize data/chat --source chats.jsonl --train-turns last --out data/chat-last`

    **Exit codes**: 0 done; 1 done, but too many rows rejected; 2 invalid options, another source or family, or
    conversations that are neither stored nor given; 3 out of space or workers; 130 interrupted.
    """
    import json
    import time

    from vlmdata.cli.console import messages
    from vlmdata.machine import available_cores
    from vlmdata.preprocess.cli.locations import output_store
    from vlmdata.preprocess.cli.progress import ProgressDisplay
    from vlmdata.preprocess.cli.report import report_of, show
    from vlmdata.preprocess.cli.run_command import quiet_libraries
    from vlmdata.preprocess.recode.old_dataset import OldDataset
    from vlmdata.preprocess.retokenize.run import old_config, retokenize_dataset
    from vlmdata.preprocess.run.dataset import Watcher
    from vlmdata.reasons import Reason

    if workers is not None and workers < 1:
        raise typer.BadParameter(f"workers is {workers}; it must be at least 1")
    if source is None and (given := [name for name in _OF_SOURCE if locals()[name]]):
        raise typer.BadParameter(f"--{given[0].replace('_', '-')} needs --source")
    talk, begun, store = messages(), time.monotonic(), output_store(out)
    quiet_libraries()
    old = OldDataset.open(data)
    before = old_config(old)
    texts = {
        "tokenizer": tokenizer,
        "tokenizer_revision": tokenizer_revision,
        "train_turns": train_turns,
        "train_think": train_think,
        "max_length": max_length,
        "overlong": overlong,
        "special_text": special_text,
        "strict": strict,
        "pad_multiple": pad_multiple,
        "system_prompt": system_prompt,
        "chat_template_kwargs": chat_template_kwargs,
    }
    try:
        config = _with(before, texts, recipe_option or [], image_root)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    rows = None
    if source is not None:
        talk.print(f"opening {source} …", markup=False, soft_wrap=True)
        rows = _open(source, config, split, subset, revision, reader, limit, hash_source)
    number = workers or available_cores()
    with ProgressDisplay(talk, config, number, None, as_json=as_json) as display:
        made = retokenize_dataset(
            old,
            store,
            config,
            source=rows,
            keep_rejected=keep_rejected,
            workers=number,
            overwrite=overwrite,
            watcher=Watcher(display.start, display.shard_done),
        )
    lacking = old.manifest.totals.rejected - old.manifest.rejects.get(Reason.NO_TARGETS, 0)
    # Without their source, they stay rejected. The run that rejected them was accepted.
    left_out = lacking if source is None else 0
    report = report_of(store, made, time.monotonic() - begun, max_reject_rate, "the command", left_out)
    if as_json:
        print(json.dumps(report.to_json(), indent=2))
    show(report, talk, as_json)
    raise typer.Exit(int(report.failure is not None))


_OF_SOURCE = ("split", "subset", "revision", "reader", "limit", "hash_source", "image_root", "recipe_option")


def _with(
    before: PreprocessConfig, texts: dict[str, Any], recipe_options: list[str], image_root: str | None
) -> PreprocessConfig:
    """Returns the options of the dataset with those that the user gave instead."""
    from vlmdata.preprocess.chat.template_arguments import parse_arguments
    from vlmdata.preprocess.cli.preprocess import by_name

    given = {name: value for name, value in texts.items() if value is not None}
    if given.get("system_prompt") == "":
        given["system_prompt"] = None
    if "tokenizer" in given and "tokenizer_revision" not in given:
        given["tokenizer_revision"] = None
    if "chat_template_kwargs" in given:
        given["chat_template_kwargs"] = parse_arguments(given["chat_template_kwargs"])
    if given.get("overlong", Overlong.SHRINK_IMAGES) is not Overlong.SHRINK_IMAGES:
        given["overlong_min_pixels"] = None
    options = {**before.recipe_options, **by_name("--recipe-option", recipe_options)}
    media = before.media if image_root is None else replace(before.media, image_root=image_root)
    return replace(before, **given, recipe_options=options, media=media)


def _open(
    spec: str,
    config: PreprocessConfig,
    split: str | None,
    subset: str | None,
    revision: str | None,
    reader: str | None,
    limit: int | None,
    hash_source: bool,
) -> Source:
    from vlmdata.preprocess.cli.locations import source_place
    from vlmdata.preprocess.sources.open import open_source

    return open_source(
        source_place(spec),
        recipe=config.recipe,
        split=split,
        config_name=subset,
        revision=revision,
        limit=limit,
        hash_source=hash_source,
        image_root=config.media.image_root,
        reader=reader,
    )
