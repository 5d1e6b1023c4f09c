"""``vlmdata plan``: reports how datasets are packed, before training."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlmdata.cli.loader_options import with_loader_options
from vlmdata.wording import counted

if TYPE_CHECKING:
    from rich.table import Table

    from vlmdata.format.dataset import VlmDataset
    from vlmdata.loader.config import LoaderConfig
    from vlmdata.loader.run_record import LoaderChoice
    from vlmdata.packing.plan.estimates import Split
    from vlmdata.packing.plan.report import PlanReport
    from vlmdata.packing.plan.run import RunPlans
    from vlmdata.packing.plan.shares import StepShares


@with_loader_options("dp_rank", "balance")
def plan(
    choice: LoaderChoice,
    data: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DIR",
            help="Dataset directories or fsspec URLs, or a mixture file (.toml). Default: those of --run.",
        ),
    ] = None,
    epoch: Annotated[
        int | None, typer.Option(help="Epoch to plan.", show_default="0, or the first one after --continue")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Show the mixture over this many steps, from the epoch on.")
    ] = None,
    continued: Annotated[
        str | None,
        typer.Option(
            "--continue",
            metavar="STATE",
            help="Plan how a run goes on from here with these data and options: a JSON file of the loader's state, or "
            "a checkpoint of vlmdata train.",
        ),
    ] = None,
    vision_gpus: Annotated[
        int | None, typer.Option(help="Estimate a vision tower on this many GPUs of its own (parallel.vision_gpus).")
    ] = None,
    gpus: Annotated[int, typer.Option(help="GPUs of both sides, with --vision-gpus.")] = 8,
    vision_ahead: Annotated[
        int, typer.Option(help="Micro-batches that such a tower encodes ahead (parallel.vision_ahead).")
    ] = 1,
    stages: Annotated[int, typer.Option("--pp", help="Pipeline stages of the language model, with --vision-gpus.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Plan an epoch and report packs, fill, waste, balance and steps. Reads the index only, no media.

    **Examples**

    - `vlmdata plan build/demo --capacity 8192`

    - `vlmdata plan data/cord data/chat --capacity 16384 --global-batch 64 --dp 8 --cp 2 --tp 2 --sp
      --weights 0.7,0.3`

    - `vlmdata plan data/cord --global-batch 24 --tp 2 --sp --cost 27b --vision-gpus 2 --gpus 8`

    - `vlmdata plan --run runs/cord --capacity 16384` (a run with another capacity)

    - `vlmdata plan mixture.toml --capacity 16384 --steps 5000` (the mixture over 5,000 steps)

    - `vlmdata plan data/cord data/chat data/new --weights 1,0,2 --capacity 16384 --continue
      runs/cord/checkpoints/step-00001000 --steps 500` (a change of the mixture, before it is made)

    **Exit codes**: 0 done; 2 invalid option, no dataset, or a sample that fits no pack.
    """
    from vlmdata.cli.console import results
    from vlmdata.errors import UsageError
    from vlmdata.integrations.videos import video_notes
    from vlmdata.loader.config import Service
    from vlmdata.loader.data import open_data, require_one_tokenizer
    from vlmdata.packing.plan.estimates import split_estimates
    from vlmdata.packing.plan.report import report_plan
    from vlmdata.packing.plan.shares import shares_over_steps
    from vlmdata.storage.choices import DEFAULT_CACHE_BYTES

    places = choice.data(data or [])
    datasets = open_data(places, None, DEFAULT_CACHE_BYTES, Service()).datasets
    if choice.run is not None and not data:
        choice.run.require_same_data(datasets)
    require_one_tokenizer(datasets)
    plans, loader_config, first = _plans(choice, places, datasets, continued)
    if len(places) < len(datasets):  # a mixture file, or a collation service with several
        places = [dataset.name for dataset in datasets]
    planned = plans[first if epoch is None else epoch]
    config, epoch = planned.config, planned.epoch
    report = report_plan(planned, loader_config.parallelism.dp_size or 1)
    mixture = [] if steps is None else shares_over_steps(plans, epoch, steps)
    splits: Sequence[Split] = ()
    if vision_gpus is not None:
        layout = loader_config.parallelism
        splits = split_estimates()(
            planned, gpus, layout.tensor_parallel * layout.context_parallel, stages, vision_ahead
        )
        if vision_gpus not in [each.vision_gpus for each in splits]:
            fitting = ", ".join(str(each.vision_gpus) for each in splits)
            raise UsageError(
                f"--vision-gpus {vision_gpus} of --gpus {gpus} does not fit: the other GPUs must hold whole layouts, "
                f"whose number must divide --global-batch {config.global_batch}; choose {fitting}"
            )
    notes = video_notes([(dataset.name, dataset.manifest) for dataset in datasets])
    if as_json:
        split = {"splits": [dataclasses.asdict(each) for each in splits]} if splits else {}
        over = {} if steps is None else {"mixture": [dataclasses.asdict(each) for each in mixture]}
        values = {"data": places, "config": config.to_dict(), **report.to_dict(), **split, **over, "notes": notes}
        print(json.dumps(values, indent=2))
    else:
        _print(places, report, mixture)
        if vision_gpus is not None:
            _print_splits(splits, vision_gpus, gpus)
        for note in notes:
            results().print(note, markup=False, highlight=False)


def _plans(
    choice: LoaderChoice, places: list[str], datasets: Sequence[VlmDataset], continued: str | None
) -> tuple[RunPlans, LoaderConfig, int]:
    """Returns the plans of a run, the options, and the epoch with which a continued run begins."""
    from vlmdata.loader.mixture import mixture_in
    from vlmdata.loader.request.index_rows import sample_table
    from vlmdata.loader.state import restore, state_in
    from vlmdata.packing.plan.run import RunPlans

    table = sample_table(datasets)
    offsets = table.dataset_offsets()
    options, mixture = choice.config(datasets, places), mixture_in(places)
    if mixture is not None:
        options = mixture.applied(options, table)
    config, known, first = options.plan_config(datasets[0].family.name), None, 0
    if continued is not None:
        fingerprints = tuple((dataset.name, dataset.manifest.fingerprint) for dataset in datasets)
        found = restore(state_in(continued), options.parallelism.dp_size or 1, fingerprints, config, change=True)
        config = dataclasses.replace(config, earlier=found.earlier)
        known, first = found.known, found.position.epoch

    def key_of(sample: int) -> str:
        dataset = int(table.dataset[sample])
        return f"{Path(datasets[dataset].name).name}:{datasets[dataset].index.key(sample - int(offsets[dataset]))}"

    return RunPlans(table, config, key_of, known), options, first


def _print(data: list[str], report: PlanReport, mixture: Sequence[StepShares]) -> None:
    from vlmdata.cli.console import results

    console = results()
    console.print(_table(report))
    if len(data) > 1:
        console.print(_shares(data, report))
    if mixture:
        console.print(_over_steps(data, mixture))


def _print_splits(splits: Sequence[Split], chosen: int, gpus: int) -> None:
    from rich.table import Table

    from vlmdata.cli.console import results
    from vlmdata.packing.plan.estimates import best_split

    best = best_split(splits).vision_gpus
    table = Table(
        *("GPUs for vision", "for language", "vision waits", "language waits", "relative to one layout", ""),
        title=f"vision on some of {gpus} GPUs, by arithmetic alone",
        title_justify="left",
    )
    for each in splits:
        notes = ["chosen"] * (each.vision_gpus == chosen) + ["best"] * (each.vision_gpus == best)
        gain = "" if each.gain is None else f"{each.gain:.2f}"
        idle = (f"{each.vision_idle:.0%}", f"{each.language_idle:.0%}")
        table.add_row(f"{each.vision_gpus}", f"{gpus - each.vision_gpus}", *idle, gain, ", ".join(notes))
    results().print(table)


def _table(report: PlanReport) -> Table:
    from rich.table import Table

    balance = report.balance
    table = Table(title=f"epoch {report.epoch}", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column()
    dropped = f", {counted(report.dropped_packs, 'pack')} dropped" if report.dropped_packs else ""
    empty = f", {counted(report.empty_packs, 'empty pack')} at the end" if report.empty_packs else ""
    table.add_row("samples", f"{report.samples:,}", counted(report.tokens, "token"))
    table.add_row("packs", f"{report.packs:,}", f"at least {report.lower_bound:,} needed: {report.excess:+.2%}")
    table.add_row("  by volume alone", f"{report.volume_bound:,}", "packs if lengths divided the room exactly")
    table.add_row("steps", f"{report.steps:,}", f"optimizer steps per epoch{dropped}{empty}")
    table.add_row("fill", f"{report.fill:.2%}", "true tokens / capacity of the packs")
    table.add_row("  alignment waste", f"{report.alignment_waste:.2%}", "samples padded for the parallel layout")
    table.add_row("  capacity waste", f"{report.capacity_waste:.2%}", "space that no sample fills")
    table.add_row(
        "padded batches", f"{report.naive_padded_tokens:,}", f"tokens, {report.naive_ratio:.2f} times the packed tokens"
    )
    if report.dp_size > 1:
        table.add_row(
            "cost over ranks",
            f"{balance.rank_after:.3f}",
            f"max / mean of a step (mean); {balance.rank_before:.3f} unbalanced",
        )
        table.add_row("  worst step", f"{balance.rank_after_worst:.3f}", f"{balance.rank_before_worst:.3f} unbalanced")
        table.add_row(
            "  per micro-batch", f"{balance.micro_batch_after:.3f}", f"{balance.micro_batch_before:.3f} unbalanced"
        )
    return table


def _shares(data: list[str], report: PlanReport) -> Table:
    from rich.table import Table
    from rich.text import Text

    columns = ("dataset", "samples", "tokens", "share of tokens", "share of targets")
    table = Table(*columns, title="blend", title_justify="left")
    for name, share in zip(data, report.datasets, strict=True):
        shares = (f"{share.token_share:.1%}", f"{share.target_share:.1%}")
        table.add_row(Text(name), f"{share.samples:,}", f"{share.tokens:,}", *shares)
    return table


def _over_steps(data: list[str], mixture: Sequence[StepShares]) -> Table:
    from rich.table import Table
    from rich.text import Text

    columns = ("steps", "dataset", "samples", "share of samples", "of tokens", "of targets")
    table = Table(*columns, title="mixture over steps of the run, from 0", title_justify="left")
    for part in mixture:
        steps = f"{part.first_step:,} to {part.first_step + part.steps - 1:,}"
        for number, (name, share) in enumerate(zip(data, part.datasets, strict=True)):
            shares = [f"{each:.1%}" for each in (share.sample_share, share.token_share, share.target_share)]
            table.add_row("" if number else steps, Text(name), f"{share.samples:,}", *shares)
    return table
