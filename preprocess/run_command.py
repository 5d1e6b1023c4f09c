"""What ``vlmdata preprocess`` does once its options are read: open, run under a progress display, report."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from rich.console import Console
from rich.markup import escape

from preprocess.chat.tokenizer import load_tokenizer
from preprocess.config import EMBEDDED, PreprocessConfig
from preprocess.effects import refuse_foreign_options, refuse_without_effect, require_tokenizer
from preprocess.encode import Encoder
from preprocess.engines.base import Engine, load_engine
from preprocess.family import family_of
from preprocess.image_files import listed
from preprocess.locations import local_source, output_directory
from preprocess.outputs import Output, divide, split_names
from preprocess.progress import progress_display
from preprocess.recipes.base import load_recipe
from preprocess.recipes.choice import choose_recipe, misfit, recipe_for
from preprocess.recipes.media import require_image_root
from preprocess.report import Report, report_of
from preprocess.run import Watcher, preprocess_dataset
from preprocess.sources.open import DEMO, open_source
from preprocess.sources.rows import Source
from preprocess.trace import trace_row
from preprocess.trace_text import print_trace
from vlmdata.cli.machine import available_cores
from vlmdata.errors import SourceError
from vlmdata.wording import counted

#: Without a terminal, there is a line at this count and whenever it has doubled.
_LEAST_COUNT = 64


def run_command(
    spec: str,
    out: str | None,
    config: PreprocessConfig,
    given: Collection[str],
    *,
    split: str | None,
    subset: str | None,
    revision: str | None,
    limit: int | None,
    holdout: float | None,
    engine: str,
    workers: int | None,
    overwrite: bool,
    hash_source: bool,
    max_reject_rate: float,
    as_json: bool,
    trace: int | None = None,
) -> int:
    """Runs the command; returns its exit code.

    Args:
        spec: The source, as typed.
        out: The output folder, as typed; a traced row needs none.
        config: Options that decide the bytes; a recipe or tokenizer in it counts only if the user gave it.
        given: Names of the options that the user gave.
        split: Split to read, or several, separated by commas: each gives a dataset in a folder of its own.
        subset: Configuration of a hub dataset.
        revision: Revision of a hub dataset.
        limit: Most rows to read of each split.
        holdout: Share of the rows to hold out as a dataset of its own.
        engine: Name of the engine that makes shards.
        workers: Workers; None is one per core.
        overwrite: Whether to remove a dataset that stands in the output folder.
        hash_source: Whether to compare all image files of an earlier run by content.
        max_reject_rate: Largest share of rejected rows that is no failure.
        as_json: Whether to print the summary as JSON.
        trace: A row to show instead of making a dataset.
    """
    # stdout is for the summary alone; progress, like all talk, goes to stderr.
    talk = Console(stderr=True, highlight=False)
    spec, directory = local_source(spec), None if out is None else output_directory(out)
    _check_options(spec, config, given)
    made_by = load_engine(engine)
    names = split_names(split, holdout=holdout, trace=trace)
    quiet_libraries()
    if config.tokenizer != EMBEDDED:
        load_tokenizer(config.tokenizer, config.tokenizer_revision)  # before the source, which may be a long download
    talk.print(f"opening {spec} …", markup=False, soft_wrap=True)
    with _counting(talk, "receipt", "drawn") as drawn:
        sources = {
            name: open_source(
                spec,
                layout=config.recipe,
                split=name,
                config_name=subset,
                revision=revision,
                limit=limit,
                drawn=drawn,
            )
            for name in names
        }
    config = _with_family(_with_recipe(config, sources, spec, given, talk), given, talk)
    if trace is not None:
        return _trace(sources[names[0]], config, trace)
    assert directory is not None
    workers = workers or available_cores()
    with _counting(talk, "row", "read to divide them") as read:
        outputs = divide(sources, directory, holdout=holdout, workers=workers, on_rows=read)
    reports = {}
    for output in outputs:
        report = reports[output.name] = _make(
            output,
            config,
            talk,
            max_reject_rate,
            engine=made_by,
            workers=workers,
            overwrite=overwrite,
            hash_source=hash_source,
        )
        if not as_json:
            report.print(Console(highlight=False))
        if report.failure is not None:
            talk.print("[bold red]failed:[/]", end=" ")
            talk.print(report.failure, soft_wrap=True, markup=False)
    if as_json:
        summaries = {name: report.to_json() for name, report in reports.items()}
        print(json.dumps(summaries.get(None, summaries), indent=2))
    return int(any(report.failure is not None for report in reports.values()))


def _make(
    output: Output,
    config: PreprocessConfig,
    talk: Console,
    max_reject_rate: float,
    *,
    engine: Engine,
    workers: int,
    overwrite: bool,
    hash_source: bool,
) -> Report:
    """Makes one dataset, or continues it."""
    begun = time.monotonic()
    if output.name is not None:
        talk.print(f"{output.name}: {output.directory}", markup=False, soft_wrap=True)
    with progress_display(talk, config, workers) as display:
        result = preprocess_dataset(
            output.source,
            output.directory,
            config,
            workers=workers,
            overwrite=overwrite,
            hash_source=hash_source,
            engine=engine,
            watcher=Watcher(display.start, display.shard_done, partial(_print_changed_files, talk)),
        )
    return report_of(output.directory, result, time.monotonic() - begun, max_reject_rate)


def _print_changed_files(talk: Console, changed: Mapping[int, Sequence[str]]) -> None:
    talk.print(
        f"{counted(len(changed), 'finished shard')} made again: image files have changed since ({listed(changed)})",
        markup=False,
        soft_wrap=True,
    )


def _check_options(spec: str, config: PreprocessConfig, given: Collection[str]) -> None:
    """All that can be refused before the source is opened, which may take a while."""
    if "recipe" in given:
        load_recipe(config.recipe, config.recipe_options)  # a wrong name is told at once
        refuse_foreign_options(config, given)
    refuse_without_effect(spec, config.tokenizer, given)
    require_image_root(config.media.image_root)
    require_tokenizer(spec, given)


def _with_recipe(
    config: PreprocessConfig, sources: Mapping[str | None, Source], spec: str, given: Collection[str], talk: Console
) -> PreprocessConfig:
    """The config with the recipe that the user named, or that the columns choose."""
    if "recipe" in given:
        for source in sources.values():
            if warning := misfit(source, spec, config):
                talk.print(f"[yellow]warning:[/] {escape(warning)}", soft_wrap=True)
        return config
    if spec != DEMO:  # which has the default's rows
        chosen = {name: choose_recipe(source, spec) for name, source in sources.items()}
        if len(set(chosen.values())) > 1:
            listed = ", ".join(f"{recipe} for {name}" for name, recipe in chosen.items())
            raise SourceError(f"SOURCE {spec}: the columns of its splits choose several recipes ({listed}). Name one.")
        config = dataclasses.replace(config, recipe=next(iter(chosen.values())))
        talk.print(f"recipe {config.recipe}, chosen by the columns", markup=False)
    refuse_foreign_options(config, given)
    return config


def _with_family(config: PreprocessConfig, given: Collection[str], talk: Console) -> PreprocessConfig:
    """The config with the family that the user named, or that the tokenizer's files tell."""
    if "family" in given or config.tokenizer == EMBEDDED:
        return config
    found = family_of(config.tokenizer, config.tokenizer_revision)
    if found != config.family:
        talk.print(f"family {found}, by the tokenizer's files", markup=False)
    return dataclasses.replace(config, family=found)


def _trace(source: Source, config: PreprocessConfig, row: int) -> int:
    tokenizer = load_tokenizer(config.tokenizer, config.tokenizer_revision)
    traced = trace_row(source, recipe_for(source, config), Encoder(config, tokenizer), row)
    print_trace(Console(highlight=False), traced, config.recipe, tokenizer)
    return 0 if traced.accepted else 1


def quiet_libraries() -> None:
    """Keeps other libraries' bars and hints out of our output; their warnings of failures stay."""
    import datasets
    from transformers.utils import logging as transformers_logging

    datasets.disable_progress_bars()
    logging.getLogger("huggingface_hub.repocard").setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()


@contextmanager
def _counting(talk: Console, what: str, done: str) -> Iterator[Callable[[int], None]]:
    """Gives a function that shows a growing number; nothing is shown unless it is called."""
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
