"""What ``vlmdata preprocess`` does once its options are read: open, run under a progress display, report."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from preprocess.chat.tokenizer import load_tokenizer
from preprocess.config import PreprocessConfig
from preprocess.encode import Encoder
from preprocess.job import Watcher, preprocess_dataset
from preprocess.progress import progress_display
from preprocess.recipes.base import load_recipe
from preprocess.recipes.media import require_image_root
from preprocess.report import report_of
from preprocess.shard_job import recipe_for
from preprocess.sources.open import open_source
from preprocess.sources.rows import Source
from preprocess.trace import trace_row
from preprocess.trace_text import print_trace
from vlmdata.cli.machine import available_cores

#: Off a terminal, one line for so many drawn receipts.
_DRAWN_PER_LINE = 64


def run_command(
    spec: str,
    directory: Path | None,
    config: PreprocessConfig,
    *,
    split: str | None,
    subset: str | None,
    revision: str | None,
    limit: int | None,
    workers: int | None,
    overwrite: bool,
    max_reject_rate: float,
    as_json: bool,
    trace: int | None = None,
) -> int:
    """Runs the command; returns its exit code. A traced row needs no directory."""
    # stdout is for the summary alone; progress, like all talk, goes to stderr.
    talk = Console(stderr=True, highlight=False)
    quiet_libraries()
    begun = time.monotonic()
    load_recipe(config.recipe, config.recipe_options)  # a wrong name is told at once
    require_image_root(config.recipe_options.image_root)
    talk.print(f"opening {spec} …", markup=False)
    with _drawing(talk) as drawn:
        source = open_source(
            spec,
            layout=config.recipe,
            split=split,
            config_name=subset,
            revision=revision,
            limit=limit,
            drawn=drawn,
        )
    if trace is not None:
        return _trace(source, config, trace)
    assert directory is not None
    with progress_display(talk) as display:
        result = preprocess_dataset(
            source,
            directory,
            config,
            workers=workers or available_cores(),
            overwrite=overwrite,
            watcher=Watcher(display.start, display.shard_done),
        )
    report = report_of(directory, result, time.monotonic() - begun, max_reject_rate)
    if as_json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        report.print(Console(highlight=False))
    if report.too_many_rejects:
        report.print_reject_failure(talk)
        return 1
    return 0


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
def _drawing(talk: Console) -> Iterator[Callable[[int], None]]:
    """Says how far the demo's receipts are drawn; silent where they are drawn already, and for other sources."""
    with talk.status("") as status:
        if not talk.is_terminal:
            status.stop()

        def drawn(rows: int) -> None:
            status.update(f"drawing receipts: {rows}")
            if not talk.is_terminal and rows % _DRAWN_PER_LINE == 0:
                talk.print(f"drawing receipts: {rows}")

        yield drawn
