"""A step, a source row and search results in the terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from vlmdata.inspect.terminal.draw import columns, data, facts
from vlmdata.inspect.trace import RowTrace, StepDescription


def print_step(console: Console, step: StepDescription) -> None:
    """Prints the samples of a step, by rank and micro-batch."""
    samples = [sample for pack in step.packs for sample in pack.samples]
    ranks = sorted({pack.dp_rank for pack in step.packs})
    who = f"data-parallel rank {ranks[0]} of {step.dp_size}" if len(ranks) < step.dp_size else f"{step.dp_size} ranks"
    console.print(
        facts(
            ("step", f"{step.step:,} of {step.steps:,}", f"epoch {step.epoch}, {who}"),
            ("samples", f"{len(samples):,}", f"{sum(sample.length for sample in samples):,} true tokens"),
            ("patches", f"{sum(pack.patches for pack in step.packs):,}", ""),
        )
    )
    several = len(step.datasets) > 1
    names = ["key", "row", "tokens", "targets", "images", "patches", "used before"]
    if several:
        names.insert(0, "dataset")
    for pack in step.packs:
        console.print()
        name = "empty pack" if pack.pack < 0 else f"pack {pack.pack}"
        size = f"{pack.tokens:,} tokens, {pack.patches:,} patches, {pack.cost * 2**20 / 1e12:,.1f} TFLOP"
        title = f"rank {pack.dp_rank}, micro-batch {pack.micro_batch}: {name}, {size}"
        console.print(Text(title, "bold"), soft_wrap=True)
        if not pack.samples:
            continue
        table = columns("", *names, left=("key", "dataset"))
        for sample in pack.samples:
            dataset = [data(Path(step.datasets[sample.dataset]).name)] if several else []
            cut = Text(" cut", "yellow") if sample.truncated else Text("")
            numbers = (sample.source_row, sample.length, sample.targets, sample.images, sample.patches, sample.repeat)
            table.add_row(*dataset, data(sample.key) + cut, *(f"{value:,}" for value in numbers))
        console.print(table)


def print_row(console: Console, trace: RowTrace) -> None:
    """Prints what became of a source row (for an accepted one, the lines that its sample does not say)."""
    if trace.status == "rejected":
        console.print(
            facts(
                ("source row", f"{trace.source_row:,}", f"of {trace.rows:,}"),
                ("rejected", data(trace.reason, "yellow"), ""),
                ("because", data(trace.message), ""),
            )
        )
        return
    for use in trace.uses:
        where = f"epoch {use.epoch}, pack {use.pack}"
        if use.step is None:
            console.print(f"used in {where}, which is dropped with the incomplete last step")
        else:
            console.print(f"used in {where}: step {use.step}, rank {use.dp_rank}, micro-batch {use.micro_batch}")
