"""``vlmdata preprocess``: the options. Heavy imports wait until it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from preprocess.config import (
    ImageConfig,
    MediaConfig,
    Overlong,
    PreprocessConfig,
    SpecialText,
    TrainThink,
    TrainTurns,
)
from vlmdata.families import DEFAULT_FAMILY, REGISTRY
from vlmdata.media.codecs import describe_codecs

_IMAGES, _TEXT, _DATA, _RUN = "Images", "Text and targets", "Data", "Run"


def preprocess(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            help="`demo`, a hub dataset id, a parquet/arrow/JSONL/CSV file or WebDataset tar, a folder of them (all "
            "of these also as s3://, gs://, az://, hf:// or https://), or a save_to_disk folder."
        ),
    ] = "demo",
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            "-o",
            help="Dataset to make or continue: a folder, or s3://, gs:// or az:// of one in a bucket. Required, except "
            "with --trace.",
        ),
    ] = None,
    recipe: Annotated[
        str,
        typer.Option(
            help="`cord_v2`, `chat`, `text`, `caption`, or your own as `module:attribute` or `file.py:attribute`. "
            "Default: by the columns.",
            rich_help_panel=_DATA,
            show_default=False,
        ),
    ] = PreprocessConfig.recipe,
    recipe_option: Annotated[
        list[str] | None,
        typer.Option(
            "--recipe-option",
            "-O",
            metavar="NAME=VALUE",
            help="Option of the recipe; repeat for several. `cord_v2`: prompt, target. `caption`: prompt, "
            "stray_marks. `chat`, `text`: stray_marks. `-O help` describes them, also for your own --recipe.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    moved: Annotated[list[str] | None, typer.Option("--prompt", "--target", "--stray-marks", hidden=True)] = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="Split to read. Default: train, or the only one. Several, as in `train,validation`, make one dataset "
            "each, in folders of --out.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    subset: Annotated[str | None, typer.Option(help="Configuration of a hub dataset.", rich_help_panel=_DATA)] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a hub dataset.", rich_help_panel=_DATA)
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(help="Read only this many rows, from the first (demo: draw this many).", rich_help_panel=_DATA),
    ] = None,
    holdout: Annotated[
        float | None,
        typer.Option(
            help="Hold out this share of the rows, such as 0.02, chosen by a hash of their content. Makes datasets "
            "`train` and `validation` in --out.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    image_root: Annotated[
        str | None,
        typer.Option(
            help="Folder or URL (s3://…) that image paths in the data are relative to and may not leave. Default: the "
            "source's folder.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    allow_urls: Annotated[
        bool, typer.Option("--allow-urls", help="Download http(s) images named in the data.", rich_help_panel=_DATA)
    ] = False,
    allow_private_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST",
            help="With --allow-urls: a host in a private network, or on this machine, that may be asked; "
            "`host` or `host:port`. Repeatable.",
            rich_help_panel=_DATA,
            show_default=False,
        ),
    ] = None,
    tokenizer: Annotated[
        str,
        typer.Option(
            help="Your model's tokenizer: hub id or folder, e.g. Qwen/Qwen3.5-9B. Required except for the demo. "
            "`embedded` is a small one for trials.",
            rich_help_panel=_TEXT,
            show_default=False,
        ),
    ] = PreprocessConfig.tokenizer,
    tokenizer_revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a hub tokenizer.", rich_help_panel=_TEXT)
    ] = None,
    family: Annotated[
        str | None,
        typer.Option(
            help=f"Model family: {', '.join(REGISTRY)}. Default: from the tokenizer's files, else {DEFAULT_FAMILY}.",
            rich_help_panel=_TEXT,
        ),
    ] = None,
    train_turns: Annotated[
        TrainTurns,
        typer.Option(
            help="Learn all assistant turns in one sample, only the last, or each in a sample of its own, with the "
            "context that inference has; images are stored once.",
            rich_help_panel=_TEXT,
        ),
    ] = PreprocessConfig.train_turns,
    train_think: Annotated[
        TrainThink,
        typer.Option(help="Learn think blocks: if they contain reasoning, always, or never.", rich_help_panel=_TEXT),
    ] = PreprocessConfig.train_think,
    max_length: Annotated[
        int, typer.Option(help="Largest number of tokens in a sample.", rich_help_panel=_TEXT)
    ] = PreprocessConfig.max_length,
    overlong: Annotated[
        Overlong,
        typer.Option(
            help="Longer samples: reject, truncate the last answer or document, or split a document into samples.",
            rich_help_panel=_TEXT,
        ),
    ] = PreprocessConfig.overlong,
    special_text: Annotated[
        SpecialText,
        typer.Option(help="Text of special tokens in data: reject, or encode as plain text.", rich_help_panel=_TEXT),
    ] = PreprocessConfig.special_text,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Reject rows with keys that the recipe does not know, or with reasoning that the template drops.",
            rich_help_panel=_DATA,
        ),
    ] = False,
    pad_multiple: Annotated[
        int,
        typer.Option(help="Pad stored lengths to multiples of this (a loader can re-pad).", rich_help_panel=_TEXT),
    ] = PreprocessConfig.pad_multiple,
    min_pixels: Annotated[
        int | None,
        typer.Option(
            help="Enlarge images with fewer pixels to this.",
            show_default="the family's, 200,704 for qwen3_5",
            rich_help_panel=_IMAGES,
        ),
    ] = None,
    max_pixels: Annotated[
        int | None,
        typer.Option(
            help="Reduce images with more pixels to this.",
            show_default="the family's, 1,003,520 for qwen3_5",
            rich_help_panel=_IMAGES,
        ),
    ] = None,
    max_source_pixels: Annotated[
        int, typer.Option(help="Reject image files with more pixels before decoding.", rich_help_panel=_IMAGES)
    ] = ImageConfig.max_source_pixels,
    pixels: Annotated[
        str,
        typer.Option(help=f"How shards store images. {describe_codecs()}.", rich_help_panel=_IMAGES),
    ] = PreprocessConfig.pixels,
    rows_per_shard: Annotated[
        int, typer.Option(help="Source rows per shard.", rich_help_panel=_RUN)
    ] = PreprocessConfig.rows_per_shard,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers", "-j", help="Workers. Default: one per core (of the cluster, with Ray).", rich_help_panel=_RUN
        ),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            help="What makes the shards: `local` (processes of this machine), `ray` (a Ray cluster), or your own as "
            "`module:attribute` or `file.py:attribute`.",
            rich_help_panel=_RUN,
        ),
    ] = "local",
    ray_address: Annotated[
        str | None,
        typer.Option(
            "--ray-address",
            help="With --engine ray: the cluster, such as 10.0.0.1:6379 or auto. Default: $RAY_ADDRESS, else Ray is "
            "started on this machine.",
            rich_help_panel=_RUN,
            show_default=False,
        ),
    ] = None,
    reject_after_deaths: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="With --engine local: reject a row, as `worker_died`, after it has ended N worker processes (out of "
            "memory, or a crash in a library). Default: the fifth death ends the run and names the row.",
            rich_help_panel=_RUN,
            show_default=False,
        ),
    ] = None,
    part: Annotated[
        str | None,
        typer.Option(
            metavar="K/N",
            help="Make every N-th shard only, from the K-th, and no manifest; `vlmdata finish` closes the dataset when "
            "all parts are made.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    max_reject_rate: Annotated[
        float,
        typer.Option(
            help="Exit with code 1 if a larger share of the rows is rejected, not counting rows of weight 0.",
            rich_help_panel=_RUN,
        ),
    ] = 0.01,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Remove a dataset in --out and start over.", rich_help_panel=_RUN)
    ] = False,
    hash_source: Annotated[
        bool,
        typer.Option(
            "--hash-source",
            help="Know the source's files by their bytes, not by footers, times or a bucket's checksums; and when "
            "continuing, read all image files of finished shards, not only those touched since.",
            rich_help_panel=_RUN,
        ),
    ] = False,
    trace: Annotated[
        int | None,
        typer.Option(
            metavar="ROW",
            help="Write nothing; show the recipe's and tokenizer's result for this row, or the traceback.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print the summary as JSON on stdout, and progress as lines of JSON on stderr.",
            rich_help_panel=_RUN,
        ),
    ] = False,
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
    from preprocess.recipes.base import describe_options
    from preprocess.run.part import Part

    if moved:
        raise typer.BadParameter(
            "--prompt, --target and --stray-marks are options of recipes: write -O prompt=…, -O target=… or "
            "-O stray_marks=…"
        )
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = frozenset(name for name, how in sources.items() if how is not None and how.name != "DEFAULT")
    if recipe_option and "help" in recipe_option:
        print(describe_options([recipe] if "recipe" in given else None))
        raise typer.Exit
    try:
        if allow_private_host and not allow_urls:
            raise ValueError("--allow-private-host has no effect without --allow-urls")
        own_options = _by_name(recipe_option or [])
        config = PreprocessConfig(
            recipe=recipe,
            tokenizer=tokenizer,
            tokenizer_revision=tokenizer_revision,
            family=family or PreprocessConfig.family,
            image=ImageConfig(min_pixels, max_pixels, max_source_pixels),
            pixels=pixels,
            recipe_options=own_options,
            media=MediaConfig(image_root, allow_urls, tuple(allow_private_host or ())),
            train_turns=train_turns,
            train_think=train_think,
            max_length=max_length,
            overlong=overlong,
            special_text=special_text,
            strict=strict,
            pad_multiple=pad_multiple,
            rows_per_shard=rows_per_shard,
        )
        if not 0 <= max_reject_rate <= 1:
            raise ValueError(f"max_reject_rate is {max_reject_rate}; it must be between 0 and 1")
        if holdout is not None and not 0 < holdout < 1:
            raise ValueError(f"holdout is {holdout}; it must be between 0 and 1")
        if workers is not None and workers < 1:
            raise ValueError(f"workers is {workers}; it must be at least 1")
        if reject_after_deaths is not None and reject_after_deaths < 1:
            raise ValueError(f"reject_after_deaths is {reject_after_deaths}; it must be at least 1")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if out is None and trace is None:
        raise typer.BadParameter("missing; give the dataset directory to make", param_hint="--out")
    if trace is not None and as_json:
        raise typer.BadParameter("--trace prints text; omit --json")
    if part is not None and trace is not None:
        raise typer.BadParameter("--trace shows one row and makes no shards; omit --part")
    if part is not None and overwrite:
        raise typer.BadParameter("--overwrite would remove the shards of other parts; omit it, or remove the folder")
    code = run_command(
        source,
        out,
        config,
        given,
        split=split,
        subset=subset,
        revision=revision,
        limit=limit,
        holdout=holdout,
        engine=engine,
        ray_address=ray_address,
        reject_after_deaths=reject_after_deaths,
        part=None if part is None else Part.parse(part),
        workers=workers,
        overwrite=overwrite,
        hash_source=hash_source,
        max_reject_rate=max_reject_rate,
        as_json=as_json,
        trace=trace,
    )
    raise typer.Exit(code)


def _by_name(options: list[str]) -> dict[str, str]:
    """Parses ``NAME=VALUE`` of each ``--recipe-option``."""
    found: dict[str, str] = {}
    for option in options:
        name, separator, value = option.partition("=")
        if not separator or not name or name in found:
            raise ValueError(f"--recipe-option {option}: give each option once, as NAME=VALUE; -O help lists them")
        found[name] = value
    return found
