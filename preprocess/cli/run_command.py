"""Runs ``vlmdata preprocess`` with parsed options: opens the source, runs with a progress display, reports."""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console
from rich.markup import escape

from vlmdata.cli.console import is_command, messages, results
from vlmdata.errors import ConfigMismatchError, SourceError, UsageError
from vlmdata.families import REGISTRY as FAMILIES
from vlmdata.families.processor import PROCESSOR
from vlmdata.format.schema import MANIFEST_NAME, PROGRESS_DIR
from vlmdata.machine import available_cores
from vlmdata.media.c_library import keep_memory
from vlmdata.media.codecs import REGISTRY as CODECS
from vlmdata.preprocess.chat.tokenizer import ChatTokenizer, family_of, load_tokenizer, told_family
from vlmdata.preprocess.cli.command import PreprocessCommand
from vlmdata.preprocess.cli.effects import refuse_foreign_options, refuse_without_effect, require_tokenizer
from vlmdata.preprocess.cli.lengths_text import print_lengths
from vlmdata.preprocess.cli.locations import output_store, source_place
from vlmdata.preprocess.cli.progress import ProgressDisplay
from vlmdata.preprocess.cli.report import PartReport, Report, report_of, show, with_shared_images
from vlmdata.preprocess.cli.served import served_bounds
from vlmdata.preprocess.cli.trace_text import print_trace
from vlmdata.preprocess.config import EMBEDDED, PreprocessConfig
from vlmdata.preprocess.encode import Encoder
from vlmdata.preprocess.encode.probe import require_usable
from vlmdata.preprocess.engines.base import Engine, errors_named, load_engine
from vlmdata.preprocess.engines.local import Local, preloaded
from vlmdata.preprocess.own_options import constructor_takes
from vlmdata.preprocess.recipes.base import PARTS, load_recipe
from vlmdata.preprocess.recipes.choice import choose_recipe, first_rows, media_for, misfit, recipe_for
from vlmdata.preprocess.recipes.image_files import listed
from vlmdata.preprocess.recipes.media import require_image_root
from vlmdata.preprocess.recipes.pictures import ByImage
from vlmdata.preprocess.registries import ENGINES, READERS, RECIPES
from vlmdata.preprocess.run.claim import Part
from vlmdata.preprocess.run.dataset import PartResult, RunResult, Watcher, preprocess_dataset, preprocess_part
from vlmdata.preprocess.run.directory import rows_per_shard_in
from vlmdata.preprocess.run.lengths import measure_lengths
from vlmdata.preprocess.run.limits import parse_limits
from vlmdata.preprocess.run.trace import number_in_source, trace_row
from vlmdata.preprocess.shards.kept_columns import require_columns
from vlmdata.preprocess.sources.holdout import TRAIN, VALIDATION, ByColumn, Grouping, hold_out
from vlmdata.preprocess.sources.open import DEMO, open_source
from vlmdata.preprocess.sources.rows import Source
from vlmdata.storage import Store
from vlmdata.wording import counted
from vlmdata.workers import end_worker_server

#: Without a terminal, prints a line at this count and at each doubling.
_LEAST_COUNT = 64
#: Why an option of the command is not for the general family.
_WHY_NOT = {
    "lengths": ", whose processor tells lengths only by making the samples",
    "part": " with --trust-remote-code: `vlmdata finish` runs no code that a run recorded",
}


def run_command(command: PreprocessCommand) -> int:
    """Runs the command. Returns its exit code."""
    # stdout is only for the summary; progress and other messages go to stderr.
    talk = messages()
    keep_memory()  # one worker runs in this process
    command = dataclasses.replace(command, source=source_place(command.source))
    store = None if command.out is None else output_store(command.out)
    part = None if command.part is None else Part.parse(command.part)
    _check_options(command)
    engine = load_engine(command.engine, command.engine_options)
    names = split_names(command.split, holdout=command.holdout, trace=command.trace, lengths=command.lengths)
    if store is not None:
        _warm_up(command, engine, [store if name is None else store.below(name) for name in _made(command, names)])
    try:
        command, tokenizer, sources = _opened(command, names, talk)
    except BaseException:
        if is_command():
            # The server may import for seconds more, and readers of this process's messages would wait for its end.
            end_worker_server()
        raise
    if command.trace is not None:
        (source,) = sources.values()
        number = command.trace
        if store is not None and command.holdout is None:
            number = number_in_source(store, source, number)
        return _trace(source, command.config, number)
    if command.lengths is not None:
        return _measure(sources[names[0]], command, talk)
    assert store is not None
    with _counting(talk, "row", "read to divide them") as read:
        workers = command.workers or available_cores()
        preload = preloaded(runs_own_code(command))
        by = _grouping(command, sources)
        outputs = divide(sources, store, holdout=command.holdout, by=by, workers=workers, preload=preload, on_rows=read)
    with errors_named(engine):
        workers = command.workers or engine.default_workers(command.config)
    reports: dict[str | None, Report | PartReport] = {}
    for output in outputs:
        report = _make(output, command, tokenizer, engine, workers, part, talk)
        train = reports.get(TRAIN) if command.holdout is not None else None
        if isinstance(report, Report) and isinstance(train, Report):
            report = with_shared_images(report, train)
        reports[output.name] = report
        show(report, talk, command.as_json)
    if command.as_json:
        summaries = {name: report.to_json() for name, report in reports.items()}
        print(json.dumps(summaries.get(None, summaries), indent=2))
    return int(any(report.failure is not None for report in reports.values()))


def _opened(
    command: PreprocessCommand, names: Sequence[str | None], talk: Console
) -> tuple[PreprocessCommand, ChatTokenizer | None, Mapping[str | None, Source]]:
    """Loads the tokenizer and opens the splits. Returns the command with their family and recipe, and both."""
    if is_command() and not runs_own_code(command):
        importlib.import_module("vlmdata.preprocess.chat.only_tokenizers")
    quiet_libraries()
    command = dataclasses.replace(command, config=_with_family(command, talk))
    tokenizer = None
    if command.config.tokenizer != EMBEDDED:
        # before the source, a possibly long download
        tokenizer = _tokenizer_of(command.config)
        if tokenizer.template.unused:
            used, unused = tokenizer.template.file, " and ".join(tokenizer.template.unused)
            message = f"chat template: {used}, as AutoProcessor takes it; another one in {unused} is not used"
            talk.print(message, markup=False, soft_wrap=True)
    talk.print(f"opening {command.source} …", markup=False, soft_wrap=True)
    sources = _open_sources(command, names, talk)
    return dataclasses.replace(command, config=_with_recipe(command, sources, talk)), tokenizer, sources


def _grouping(command: PreprocessCommand, sources: Mapping[str | None, Source]) -> Grouping | None:
    """Returns what rows of one side of a holdout may not share with those of the other."""
    if command.holdout_by is None:
        return None
    if command.holdout_by == ByImage.name:
        return ByImage(command.config)
    for source in sources.values():
        require_columns(source, [command.holdout_by], "--holdout-by")
    return ByColumn(command.holdout_by)


def _made(command: PreprocessCommand, splits: Sequence[str | None]) -> Sequence[str | None]:
    """Returns the names of the datasets that the command makes. The name of a single one is None."""
    if command.holdout is not None:
        return [TRAIN, VALIDATION]
    return splits if len(splits) > 1 else [None]


def _warm_up(command: PreprocessCommand, engine: Engine, stores: Iterable[Store]) -> None:
    """Lets workers import their libraries while this process imports its own, unless all datasets are finished."""
    if not isinstance(engine, Local):
        return
    engine.own_code = runs_own_code(command)
    if command.overwrite or any(store.size(MANIFEST_NAME) is None for store in stores):
        with errors_named(engine):
            engine.warm_up(command.workers or engine.default_workers(command.config))


def runs_own_code(command: PreprocessCommand) -> bool:
    """Whether the run uses, or may find, code that is not built in, a processor too. Such code may need any library."""
    config = command.config
    if config.processor is not None:
        return True
    named = [(RECIPES, config.recipe), (FAMILIES, config.family), (ENGINES, command.engine)]
    named += [(CODECS, name) for name in (config.pixels, config.video.pixels) if name is not None]
    if "recipe" not in command.given:
        named += [(RECIPES, name) for name in RECIPES.trusted()]
    named += [(READERS, command.reader)] if command.reader is not None else []
    if _finds_family(command):
        named += [(FAMILIES, name) for name in FAMILIES.names()]
    return any(name not in registry for registry, name in named)


def _finds_family(command: PreprocessCommand) -> bool:
    """Whether the family is found by the tokenizer's files, among all known families."""
    return "family" not in command.given and command.config.tokenizer != EMBEDDED


def _tokenizer_of(config: PreprocessConfig) -> ChatTokenizer:
    return load_tokenizer(config.tokenizer, config.tokenizer_revision, config.model_family)


def _open_sources(command: PreprocessCommand, splits: Sequence[str | None], talk: Console) -> dict[str | None, Source]:
    """Opens each split."""
    with _counting(talk, "receipt", "drawn") as drawn:
        return {
            split: open_source(
                command.source,
                recipe=command.config.recipe,
                split=split,
                config_name=command.subset,
                revision=command.revision,
                limit=command.limit,
                hash_source=command.hash_source,
                image_root=command.config.media.image_root,
                reader=command.reader,
                drawn=drawn,
            )
            for split in splits
        }


def _make(
    output: Output,
    command: PreprocessCommand,
    tokenizer: ChatTokenizer | None,
    engine: Engine,
    workers: int,
    part: Part | None,
    talk: Console,
) -> Report | PartReport:
    """Makes one dataset or a part of it, or continues it."""
    begun = time.monotonic()
    if output.name is not None:
        talk.print(f"{output.name}: {output.store}", markup=False, soft_wrap=True)
    made: PartResult | RunResult
    config = command.config
    if "rows_per_shard" not in command.given:
        config = dataclasses.replace(
            config, rows_per_shard=None if command.overwrite else rows_per_shard_in(output.store)
        )
    with ProgressDisplay(talk, config, workers, part, as_json=command.as_json) as display:
        options: dict[str, Any] = {
            "workers": workers,
            "hash_source": command.hash_source,
            "engine": engine,
            "tokenizer": tokenizer,
            "watcher": Watcher(
                display.start, display.shard_done, partial(_print_changed_files, talk), partial(_print_compared, talk)
            ),
        }
        if part is not None:
            made = preprocess_part(part, output.source, output.store, config, **options)
        else:
            options["overwrite"] = command.overwrite
            made = preprocess_dataset(output.source, output.store, config, **options)
    seconds = time.monotonic() - begun
    if isinstance(made, PartResult):
        return PartReport(output.store, made, seconds)
    repeat = "the command" if output.split is None else f"the command, with only --split {output.split},"
    served, is_side = served_bounds(config), output.name is not None
    return report_of(output.store, made, seconds, command.max_reject_rate, repeat, served=served, is_side=is_side)


def _print_changed_files(talk: Console, changed: Mapping[int, Sequence[str]]) -> None:
    talk.print(
        f"{counted(len(changed), 'finished shard')} recreated: image files have changed ({listed(changed)})",
        markup=False,
        soft_wrap=True,
    )


def _print_compared(talk: Console, rows: int) -> None:
    if rows & (rows - 1) == 0 and rows >= _LEAST_COUNT:  # at each doubling, as far as rows are counted in blocks
        talk.print(f"{counted(rows, 'row')} compared with the newest version", markup=False)


def _check_options(command: PreprocessCommand) -> None:
    """Checks everything that does not need the source, which may take long to open."""
    spec, config, given = command.source, command.config, command.given
    if "recipe" in given:
        if "context" not in constructor_takes(RECIPES, config.recipe, PARTS):  # which depends on the tokenizer
            load_recipe(config.recipe, config.recipe_options)  # reports an unknown name immediately
        refuse_foreign_options(config, given)
    refuse_without_effect(spec, config.tokenizer, given)
    require_image_root(config.media.image_root)
    require_tokenizer(spec, given)


def _with_recipe(command: PreprocessCommand, sources: Mapping[str | None, Source], talk: Console) -> PreprocessConfig:
    """Returns the config with the recipe that the user gave or the columns select."""
    spec, config, given = command.source, command.config, command.given
    if "recipe" in given:
        for source in sources.values():
            if warning := misfit(source, spec, config):
                talk.print(f"[yellow]warning:[/] {escape(warning)}", soft_wrap=True)
        return config
    if spec != DEMO:  # whose rows fit the default
        chosen = {name: choose_recipe(source, spec) for name, source in sources.items()}
        if len(set(chosen.values())) > 1:
            listed = ", ".join(f"{recipe} for {name}" for name, recipe in chosen.items())
            raise SourceError(f"SOURCE {spec}: the columns of its splits select several recipes ({listed}). Set one.")
        config = dataclasses.replace(config, recipe=next(iter(chosen.values())))
        rows = first_rows(sources.values())
        talk.print(f"recipe {config.recipe}, chosen by the columns{rows}", markup=False)
    refuse_foreign_options(config, given)
    return config


def _with_family(command: PreprocessCommand, talk: Console) -> PreprocessConfig:
    """Returns the config with the family that the user gave or the tokenizer's files specify.

    Raises:
        UsageError: If the image bounds do not fit the family.
    """
    config = command.config
    if config.processor is not None:
        config = _with_processor(command, config.processor, talk)
    elif _finds_family(command):
        found = family_of(config.tokenizer, config.tokenizer_revision)
        if found != config.family:
            talk.print(f"family {found}, by the tokenizer's files", markup=False)
        config = dataclasses.replace(config, family=found)
    config.image.bounds(config.model_family)
    return config


def _with_processor(command: PreprocessCommand, processor: str, talk: Console) -> PreprocessConfig:
    """Returns the config with the family of a known model, as if its tokenizer was given, or the general family."""
    config = command.config
    if "family" in command.given:
        found = config.family
    else:
        try:
            found = told_family(processor, config.tokenizer_revision) or PROCESSOR
        except SourceError:  # a model of no family
            found = PROCESSOR
    if found != PROCESSOR:
        if config.trust_remote_code:
            raise UsageError(
                f"--trust-remote-code has no effect with the family {found}; drop it, or give --family {PROCESSOR}"
            )
        talk.print(f"family {found}, by the processor's files", markup=False)
        return dataclasses.replace(config, family=found, processor=None)
    for name in ("part", "lengths"):
        if getattr(command, name) is not None and (name == "lengths" or config.trust_remote_code):
            raise UsageError(f"--{name} is not for the family {PROCESSOR}{_WHY_NOT[name]}. Omit it.")
    config = dataclasses.replace(config, family=found)
    talk.print(f"family {found}: {type(config.learned.runner.processor).__name__} makes the samples", markup=False)
    for rule in config.learned.family.tensors:
        talk.print(f"  {rule.name}: {rule.described}", markup=False)
    return config


def _trace(source: Source, config: PreprocessConfig, row: int) -> int:
    tokenizer = _tokenizer_of(config)
    traced = trace_row(source, recipe_for(source, config), Encoder(config, tokenizer), row)
    print_trace(results(), traced, config.recipe, tokenizer)
    return 0 if traced.accepted else 1


def _measure(source: Source, command: PreprocessCommand, talk: Console) -> int:
    config = command.config
    tokenizer = _tokenizer_of(config)
    require_usable(tokenizer, config)
    media = media_for(source, config)
    limits = parse_limits(command.lengths or "")
    with _counting(talk, "row", "measured") as read:
        report = measure_lengths(
            source, recipe_for(source, config, media), media, Encoder(config, tokenizer), limits, read
        )
    if command.as_json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        print_lengths(results(), report, config.model_family.factor**2)
    return 0


def quiet_libraries() -> None:
    """Suppresses progress bars and hints of other libraries, but keeps their warnings of failures."""
    from transformers.utils import logging as transformers_logging

    # Many sources are read without `datasets`, which takes 0.6 s of CPU time to import.
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    if (datasets := sys.modules.get("datasets")) is not None:
        datasets.disable_progress_bars()
    logging.getLogger("huggingface_hub.repocard").setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()


@contextmanager
def _counting(talk: Console, what: str, done: str) -> Iterator[Callable[[int], None]]:
    """Provides a function that shows a growing number. Nothing is shown unless it is called."""
    shown = 0
    with talk.status("") as status:
        if not talk.is_terminal:
            status.stop()

        def count(number: int) -> None:
            nonlocal shown
            status.update(f"{counted(number, what)} {done}")
            if not talk.is_terminal and number >= max(_LEAST_COUNT, 2 * shown):
                talk.print(f"{counted(number, what)} {done}")
                shown = number

        yield count


@dataclass(frozen=True, eq=False)
class Output:
    """A dataset to make."""

    name: str | None  # of the split or side, and of its folder in --out; None for a single dataset
    source: Source
    store: Store
    split: str | None = None  # if the command names several


def split_names(
    split: str | None, *, holdout: float | None, trace: int | None, lengths: str | None = None
) -> list[str | None]:
    """Returns the splits in ``--split``; None means the default. Raises a SourceError for wrong ones."""
    if split is None:
        return [None]
    names = [name.strip() for name in split.split(",")]
    if "" in names or len(set(names)) != len(names):
        raise SourceError(f"--split {split}: give each split once, as in --split train,validation")
    if len(names) > 1 and holdout is not None:
        raise SourceError(f"--split {split}: --holdout divides one split; give one, or omit --holdout")
    if len(names) > 1 and trace is not None:
        raise SourceError(f"--split {split}: --trace shows a row of one split; give one")
    if len(names) > 1 and lengths is not None:
        raise SourceError(f"--split {split}: --lengths measures one split; give one")
    return [*names]


def divide(
    sources: Mapping[str | None, Source],
    store: Store,
    *,
    holdout: float | None,
    by: Grouping | None = None,
    workers: int,
    preload: Sequence[str],
    on_rows: Callable[[int], None],
) -> list[Output]:
    """Returns the datasets to make of the opened splits: one if there is a holdout.

    Calls ``on_rows`` with the number of rows read so far for the division.

    Raises:
        ConfigMismatchError: If several datasets would go into a folder that is itself a dataset.
        SourceError: If a side of the holdout would have no rows.
    """
    if len(sources) == 1 and holdout is None:
        (source,) = sources.values()
        return [Output(None, source, store)]
    if {MANIFEST_NAME, PROGRESS_DIR} & store.listing().keys():
        raise ConfigMismatchError(
            f"{store}: is itself a dataset, so it cannot contain one per split; give another --out"
        )
    if holdout is None:
        return [Output(name, source, store.below(str(name)), name) for name, source in sources.items()]
    (source,) = sources.values()
    sides = hold_out(source, holdout, by, workers=workers, preload=preload, on_rows=on_rows)
    return [Output(side, rows, store.below(side)) for side, rows in sides.items()]
