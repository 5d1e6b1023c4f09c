"""``vlmdata plan``: what packing makes of datasets, before a GPU is paid for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlmdata.wording import counted

if TYPE_CHECKING:
    from rich.table import Table

    from vlmdata.packing.report import PlanReport

_PACK, _LAYOUT, _BLEND = "Packs", "Parallel layout", "Several datasets"


def plan(
    data: Annotated[list[str], typer.Argument(metavar="DIR", help="Dataset directories or fsspec URLs.")],
    capacity: Annotated[int, typer.Option(help="Largest number of tokens in a pack.", rich_help_panel=_PACK)],
    global_batch: Annotated[
        int, typer.Option(help="Packs per optimizer step, over all ranks.", rich_help_panel=_PACK)
    ] = 1,
    max_patches: Annotated[
        int | None, typer.Option(help="Most vision patches in a pack.", rich_help_panel=_PACK)
    ] = None,
    pad_to_capacity: Annotated[
        bool, typer.Option("--pad-to-capacity", help="Packs of exactly the capacity.", rich_help_panel=_PACK)
    ] = False,
    last: Annotated[str, typer.Option(help="Incomplete last step: pad, keep, drop.", rich_help_panel=_PACK)] = "pad",
    shuffle_window: Annotated[
        int | None, typer.Option(help="Shards packed and shuffled together. Default: all.", rich_help_panel=_PACK)
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of packing and order.", rich_help_panel=_PACK)] = 0,
    epoch: Annotated[int, typer.Option(help="Which epoch to plan.", rich_help_panel=_PACK)] = 0,
    dp: Annotated[int, typer.Option(help="Data-parallel ranks.", rich_help_panel=_LAYOUT)] = 1,
    cp: Annotated[int, typer.Option(help="Context-parallel size.", rich_help_panel=_LAYOUT)] = 1,
    tp: Annotated[int, typer.Option(help="Tensor-parallel size.", rich_help_panel=_LAYOUT)] = 1,
    sp: Annotated[bool, typer.Option("--sp/--no-sp", help="Sequence parallelism.", rich_help_panel=_LAYOUT)] = True,
    pad_multiple: Annotated[
        int, typer.Option(help="Any further multiple for sample lengths.", rich_help_panel=_LAYOUT)
    ] = 1,
    cost: Annotated[
        str,
        typer.Option(
            help="Model size whose cost balances packs over ranks: 0.8b, 2b, 4b, 9b, 27b, ….", rich_help_panel=_LAYOUT
        ),
    ] = "4b",
    weights: Annotated[
        str | None, typer.Option(help="One weight per dataset, e.g. 0.7,0.3.", rich_help_panel=_BLEND)
    ] = None,
    weights_by: Annotated[
        str, typer.Option(help="What weights mean: epochs, tokens, samples.", rich_help_panel=_BLEND)
    ] = "tokens",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Plan an epoch and report packs, fill, waste, balance and steps. Reads the index only, no media.

    **Examples**

    - `vlmdata plan build/demo --capacity 8192`

    - `vlmdata plan data/cord data/chat --capacity 16384 --global-batch 64 --dp 8 --cp 2 --tp 2 --weights 0.7,0.3`

    **Exit codes**: 0 done; 2 wrong options, no dataset, or a sample that fits no pack.
    """
    from vlmdata.alignment import alignment
    from vlmdata.loader.open import DEFAULT_CACHE_BYTES, open_for_loading, require_one_tokenizer, sample_table
    from vlmdata.packing.config import Blend, PlanConfig
    from vlmdata.packing.cost import cost_model
    from vlmdata.packing.plan import plan_epoch
    from vlmdata.packing.report import report_plan

    datasets = [open_for_loading(location, None, DEFAULT_CACHE_BYTES)[0] for location in data]
    require_one_tokenizer(datasets)
    try:
        blend = Blend(weights_by, tuple(float(w) for w in weights.split(","))) if weights else None  # type: ignore[arg-type]
        config = PlanConfig(
            capacity=capacity,
            global_batch=global_batch,
            alignment=alignment(cp, tp, sp, pad_multiple),
            max_patches=max_patches,
            pad_to_capacity=pad_to_capacity,
            last=last,  # type: ignore[arg-type]
            shuffle_window=shuffle_window,
            seed=seed,
            blend=blend,
            cost=cost_model(cost),
        )
        table = sample_table(datasets)
        offsets = table.dataset_offsets()

        def key_of(sample: int) -> str:
            dataset = int(table.dataset[sample])
            return f"{Path(data[dataset]).name}:{datasets[dataset].index.key(sample - int(offsets[dataset]))}"

        report = report_plan(plan_epoch(table, config, epoch, key_of), dp)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        print(json.dumps({"data": data, "config": config.to_dict(), **report.to_dict()}, indent=2))
    else:
        _print(data, report)


def _print(data: list[str], report: PlanReport) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(_table(report))
    if len(data) > 1:
        console.print(_shares(data, report))


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
    table.add_row("steps", f"{report.steps:,}", f"optimizer steps per epoch{dropped}{empty}")
    table.add_row("fill", f"{report.fill:.2%}", "true tokens of the packs' capacity")
    table.add_row("  alignment waste", f"{report.alignment_waste:.2%}", "samples padded for the parallel layout")
    table.add_row("  capacity waste", f"{report.capacity_waste:.2%}", "room that no sample fills")
    table.add_row(
        "padded batches", f"{report.naive_padded_tokens:,}", f"tokens, {report.naive_ratio:.2f} times as many as packed"
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

    table = Table("dataset", "samples", "tokens", "share of tokens", title="blend", title_justify="left")
    for name, share in zip(data, report.datasets, strict=True):
        table.add_row(name, f"{share.samples:,}", f"{share.tokens:,}", f"{share.token_share:.1%}")
    return table
