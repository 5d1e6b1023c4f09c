"""Runs ``vlmdata preprocess`` with parsed options: opens the source, runs with a progress display, reports."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from rich.console import Console
from rich.markup import escape

from preprocess.chat.family import family_of
from preprocess.chat.tokenizer import load_tokenizer
from preprocess.cli.effects import refuse_foreign_options, refuse_without_effect, require_tokenizer
from preprocess.cli.locations import output_store, source_place
from preprocess.cli.outputs import Output, divide, split_names
from preprocess.cli.part_report import PartReport
from preprocess.cli.progress import progress_display
from preprocess.cli.report import Report, report_of
from preprocess.cli.trace_text import print_trace
from preprocess.config import EMBEDDED, PreprocessConfig
from preprocess.encode import Encoder
from preprocess.engines.base import Engine, load_engine
from preprocess.recipes.base import load_recipe
from preprocess.recipes.choice import choose_recipe, first_rows, misfit, recipe_for
from preprocess.recipes.image_files import listed
from preprocess.recipes.media import require_image_root
from preprocess.run.dataset import PartResult, RunResult, Watcher, preprocess_dataset, preprocess_part
from preprocess.run.part import Part
from preprocess.run.trace import trace_row
from preprocess.sources.open import DEMO, open_source
from preprocess.sources.rows import Source
from vlmdata.errors import SourceError
from vlmdata.machine import available_cores
from vlmdata.wording import counted

#: Without a terminal, prints a line at this count and at each doubling.
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
    ray_address: str | None = None,
    reject_after_deaths: int | None = None,
    part: Part | None = None,
    workers: int | None,
    overwrite: bool,
    hash_source: bool,
    max_reject_rate: float,
    as_json: bool,
    trace: int | None = None,
) -> int:
    """Runs the command. Returns its exit code.

    Args:
        spec: The source, as typed.
        out: The output folder or URL, as typed; not needed to trace a row.
        config: Options that affect the bytes; its recipe and tokenizer count only if the user gave them.
        given: Names of the options that the user gave.
        split: Split to read, or several separated by commas, each for a dataset in its own folder.
        subset: Configuration of a hub dataset.
        revision: Revision of a hub dataset.
        limit: Largest number of rows to read per split.
        holdout: Share of the rows to hold out as a separate dataset.
        engine: Name of the engine that makes shards.
        ray_address: The cluster of an engine that takes one.
        reject_after_deaths: Deaths of workers on a row after which it is rejected, for an engine that takes it.
        part: The part of the shards to make; None is all.
        workers: Workers; None is as many as the engine finds.
        overwrite: Whether to remove a dataset that stands in the output folder.
        hash_source: Whether to identify source files, and compare image files of an earlier run, by their bytes.
        max_reject_rate: Largest share of rejected rows without failure.
        as_json: Whether to print the summary as JSON.
        trace: A row to show instead of making a dataset.
    """
    # stdout is only for the summary; progress and other messages go to stderr.
    talk = Console(stderr=True, highlight=False, emoji=False)
    spec, store = source_place(spec), None if out is None else output_store(out)
    _check_options(spec, config, given)
    made_by = load_engine(engine, ray_address, reject_after_deaths)
    names = split_names(split, holdout=holdout, trace=trace)
    quiet_libraries()
    if config.tokenizer != EMBEDDED:
        load_tokenizer(config.tokenizer, config.tokenizer_revision)  # before the source, a possibly long download
    config = _with_family(config, given, talk)
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
                hash_source=hash_source,
                image_root=config.media.image_root,
                drawn=drawn,
            )
            for name in names
        }
    config = _with_recipe(config, sources, spec, given, talk)
    if trace is not None:
        return _trace(sources[names[0]], config, trace)
    assert store is not None
    with _counting(talk, "row", "read to divide them") as read:
        outputs = divide(sources, store, holdout=holdout, workers=workers or available_cores(), on_rows=read)
    workers = workers or made_by.default_workers(config)
    run = Run(config, made_by, workers, part, overwrite, hash_source, max_reject_rate, as_json)
    reports: dict[str | None, Report | PartReport] = {}
    for output in outputs:
        report = reports[output.name] = _make(output, run, talk)
        if not as_json:
            report.print(Console(highlight=False, emoji=False))
        if report.failure is not None:
            talk.print("[bold red]failed:[/]", end=" ")
            talk.print(report.failure, soft_wrap=True, markup=False)
    if as_json:
        summaries = {name: report.to_json() for name, report in reports.items()}
        print(json.dumps(summaries.get(None, summaries), indent=2))
    return int(any(report.failure is not None for report in reports.values()))


@dataclass(frozen=True)
class Run:
    """How datasets are made.

    Attributes:
        config: Options that decide the bytes.
        engine: Makes shards.
        workers: Workers to use.
        part: The part of the shards to make; None is all.
        overwrite: Whether to remove a dataset that stands there.
        hash_source: Whether to compare all image files of an earlier run by content.
        max_reject_rate: Largest share of rejected rows that is no failure.
        as_json: Whether progress is for programs.
    """

    config: PreprocessConfig
    engine: Engine
    workers: int
    part: Part | None
    overwrite: bool
    hash_source: bool
    max_reject_rate: float
    as_json: bool


def _make(output: Output, run: Run, talk: Console) -> Report | PartReport:
    """Makes one dataset or a part of it, or continues it."""
    begun = time.monotonic()
    if output.name is not None:
        talk.print(f"{output.name}: {output.store}", markup=False, soft_wrap=True)
    made: PartResult | RunResult
    with progress_display(talk, run.config, run.workers, run.part, as_json=run.as_json) as display:
        watcher = Watcher(display.start, display.shard_done, partial(_print_changed_files, talk))
        if run.part is not None:
            made = preprocess_part(
                run.part,
                output.source,
                output.store,
                run.config,
                workers=run.workers,
                hash_source=run.hash_source,
                engine=run.engine,
                watcher=watcher,
            )
        else:
            made = preprocess_dataset(
                output.source,
                output.store,
                run.config,
                workers=run.workers,
                overwrite=run.overwrite,
                hash_source=run.hash_source,
                engine=run.engine,
                watcher=watcher,
            )
    seconds = time.monotonic() - begun
    if isinstance(made, PartResult):
        return PartReport(output.store, made, seconds)
    command = "the command" if output.split is None else f"the command, with only --split {output.split},"
    return report_of(output.store, made, seconds, run.max_reject_rate, command)


def _print_changed_files(talk: Console, changed: Mapping[int, Sequence[str]]) -> None:
    talk.print(
        f"{counted(len(changed), 'finished shard')} recreated: image files have changed ({listed(changed)})",
        markup=False,
        soft_wrap=True,
    )


def _check_options(spec: str, config: PreprocessConfig, given: Collection[str]) -> None:
    """Checks everything that does not need the source, which may take long to open."""
    if "recipe" in given:
        load_recipe(config.recipe, config.recipe_options)  # reports an unknown name immediately
        refuse_foreign_options(config, given)
    refuse_without_effect(spec, config.tokenizer, given)
    require_image_root(config.media.image_root)
    require_tokenizer(spec, given)


def _with_recipe(
    config: PreprocessConfig, sources: Mapping[str | None, Source], spec: str, given: Collection[str], talk: Console
) -> PreprocessConfig:
    """Returns the config with the recipe that the user gave or the columns select."""
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


def _with_family(config: PreprocessConfig, given: Collection[str], talk: Console) -> PreprocessConfig:
    """Returns the config with the family that the user gave or the tokenizer's files specify.

    Raises:
        UsageError: If the image bounds do not fit the family.
    """
    if "family" not in given and config.tokenizer != EMBEDDED:
        found = family_of(config.tokenizer, config.tokenizer_revision)
        if found != config.family:
            talk.print(f"family {found}, by the tokenizer's files", markup=False)
        config = dataclasses.replace(config, family=found)
    config.image.bounds(config.model_family)
    return config


def _trace(source: Source, config: PreprocessConfig, row: int) -> int:
    tokenizer = load_tokenizer(config.tokenizer, config.tokenizer_revision)
    traced = trace_row(source, recipe_for(source, config), Encoder(config, tokenizer), row)
    print_trace(Console(highlight=False, emoji=False), traced, config.recipe, tokenizer)
    return 0 if traced.accepted else 1


def quiet_libraries() -> None:
    """Suppresses progress bars and hints of other libraries, but keeps their warnings of failures."""
    import datasets
    from transformers.utils import logging as transformers_logging

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
