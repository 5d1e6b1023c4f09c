"""``vlmdata inspect``: shows what the model will see."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlmdata.cli.loader_options import with_loader_options
from vlmdata.errors import UsageError

if TYPE_CHECKING:
    from vlmdata.loader.run_record import LoaderChoice

_look = partial(typer.Option, rich_help_panel="What to look at")
_page = partial(typer.Option, rich_help_panel="In the browser")


#: Options, and what must be shown for each to have an effect; "" is the card.
_FORMS = {
    "tokens": ("--sample", "--row"),
    "check": ("", "--find", "--html", "--serve"),
    **dict.fromkeys(("samples", "keys", "packs"), ("--html",)),
    "steps": ("--html", "--serve"),
    **dict.fromkeys(("host", "port", "allow_host"), ("--serve",)),
    "epoch": ("--pack", "--row", "--html", "--serve"),
}


@with_loader_options()
def inspect(
    context: typer.Context,
    choice: LoaderChoice,
    data: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DIR",
            help="Dataset directory or fsspec URL. --pack, --step, --html and --serve also take several, or a mixture "
            "file. Default: those of --run.",
        ),
    ] = None,
    sample: Annotated[str | None, _look(metavar="KEY|N", help="One sample, by key or number.")] = None,
    tokens: Annotated[bool, _look("--tokens", help="With --sample or --row: the token table.")] = False,
    row: Annotated[int | None, _look(metavar="SOURCE_ROW", help="The outcome of a source row.")] = None,
    find: Annotated[
        str | None, _look(metavar="QUERY", help="Samples that match, e.g. 'target<5% patches>4000 cash'.")
    ] = None,
    pack: Annotated[int | None, _look(metavar="N", help="The N-th packed batch of the rank's epoch.")] = None,
    step: Annotated[
        str | None,
        _look(
            metavar="EPOCH:STEP",
            help="The samples of an optimizer step, counted from 0; with --run also N, the step in metrics.jsonl.",
        ),
    ] = None,
    duplicates: Annotated[
        Path | None,
        _look(
            metavar="FILE",
            help="Near duplicates beside the samples that stay for them, from `vlmdata select --duplicates-report`; "
            "with --html as pictures.",
        ),
    ] = None,
    versions: Annotated[
        bool, _look("--versions", help="The versions, with rows and shards that differ; `vlmdata diff` compares two.")
    ] = False,
    check: Annotated[str, _look(metavar="N|all", help="Number of samples to check for findings.")] = "1000",
    html: Annotated[str | None, _page(metavar="FILE", help="Write a self-contained page.")] = None,
    samples: Annotated[int, _page(min=0, help="Samples in the page: extremes, suspects, then random.")] = 50,
    keys: Annotated[str | None, _page(metavar="KEY,…", help="Show these samples in the page instead.")] = None,
    packs: Annotated[int, _page(min=0, help="Packs in the page.")] = 8,
    steps: Annotated[
        int | None,
        _page(min=1, help="Steps of the mixture in the page, from --epoch on.", show_default="those of the epoch"),
    ] = None,
    serve: Annotated[bool, _page("--serve", help="Serve the page for the whole dataset.")] = False,
    host: Annotated[str, _page(help="Address to serve on.")] = "127.0.0.1",
    port: Annotated[int, _page(min=0, max=65535, help="Port to serve on; 0 picks a free one.")] = 8765,
    allow_host: Annotated[
        list[str] | None,
        _page(help="Additional host name of the server or of a proxy, for its port, 80 and 443; or NAME:PORT."),
    ] = None,
    epoch: Annotated[int, _look(min=0, help="For --pack, --row and pages.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Inspect a dataset: an overview, a sample, a packed batch, an optimizer step, or all of it in the browser.

    **Examples**

    - `vlmdata inspect build/demo`

    - `vlmdata inspect build/demo --sample 000000017 --tokens`

    - `vlmdata inspect build/demo --pack 3 --capacity 8192 --cp 4`

    - `vlmdata inspect build/demo --step 0:12 --capacity 8192 --global-batch 64 --dp 8 --dp-rank 5`

    - `vlmdata inspect --run runs/cord --step 120`

    - `vlmdata inspect build/demo --html demo.html`

    - `vlmdata inspect build/demo --serve`

    - `vlmdata inspect mixture.toml --serve --capacity 16384 --steps 5000` (the mixture over 5,000 steps)

    **Exit codes**: 0 done; 2 invalid option, or unknown dataset, sample, pack or step; 3 the page cannot be written.
    """
    from vlmdata.inspect.run import Inspection

    looks = {"--sample": sample, "--row": row, "--find": find, "--pack": pack, "--step": step, "--html": html}
    chosen = [name for name, value in looks.items() if value is not None] + ["--serve"] * serve
    chosen += ["--versions"] * versions
    if duplicates is not None and html is None:
        chosen.append("--duplicates")
    if len(chosen) > 1:
        raise UsageError(f"{' and '.join(chosen)}: choose only one")
    if html is not None and "://" in html:
        raise UsageError(f"--html {html}: the page must be a local file; give a path")
    _require_effects(context, chosen[0] if chosen else "--duplicates" if duplicates is not None else "")
    look = Inspection(choice.data(data or []), choice, epoch, as_json, steps)
    if sample is not None:
        look.sample(sample, tokens)
    elif row is not None:
        look.row(row, tokens)
    elif find is not None:
        look.find(find, _check(check))
    elif pack is not None:
        look.pack(pack)
    elif step is not None:
        look.step(*_epoch_and_step(step, of_run=choice.run is not None))
    elif versions:
        look.versions()
    elif duplicates is not None and html is None:
        look.duplicates(duplicates)
    elif html is not None:
        shown = keys.split(",") if keys else None
        look.html(Path(html), samples, shown, packs, _check(check), duplicates)
    elif serve:
        look.serve(host, port, allow_host or [], _check(check))
    else:
        look.card(_check(check))


def _require_effects(context: typer.Context, shown: str) -> None:
    """Raises a UsageError for an option that was given and has no effect on what is shown; "" is the card."""
    for name, needed in _FORMS.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE" and shown not in needed:
            hint = "; `vlmdata plan --steps` prints the mixture" if name == "steps" else ""
            words = " or ".join(each for each in needed if each)
            raise UsageError(f"--{name.replace('_', '-')} needs {words}{hint}")


def _epoch_and_step(text: str, of_run: bool) -> tuple[int | None, int]:
    """Parses epoch and step. The epoch is None if the step counts over the whole run."""
    epoch, colon, step = text.partition(":")
    if of_run and text.isdecimal():
        return None, int(text)
    if not (colon and epoch.isdecimal() and step.isdecimal()):
        hint = "; or the step of the run, from 1, as in metrics.jsonl" if of_run else ""
        raise UsageError(f"--step {text!r}: give EPOCH:STEP, e.g. 0:120, both from 0{hint}")
    return int(epoch), int(step)


def _check(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdecimal():
        raise UsageError(f"--check {text!r}: give a number of samples, or all")
    return int(text)
