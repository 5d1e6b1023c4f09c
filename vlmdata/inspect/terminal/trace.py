"""A step, a source row and search results in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from vlmdata.inspect.sample import SampleDescription
from vlmdata.inspect.terminal.draw import add_row, columns, data, facts, number
from vlmdata.inspect.terminal.sample import print_sample
from vlmdata.inspect.trace import FoundSample, RowTrace, RowUse, StepDescription
from vlmdata.wording import counted


def print_step(console: Console, step: StepDescription) -> None:
    """Prints the samples of a step, by rank and micro-batch."""
    samples = [sample for pack in step.packs for sample in pack.samples]
    ranks = sorted({pack.dp_rank for pack in step.packs})
    who = (
        f"data-parallel rank {ranks[0]} of {step.dp_size}"
        if len(ranks) < step.dp_size
        else counted(step.dp_size, "rank")
    )
    console.print(
        facts(
            ("step", f"{step.step:,} of {step.steps:,}", f"epoch {step.epoch}, {who}"),
            ("samples", f"{len(samples):,}", counted(sum(sample.length for sample in samples), "true token")),
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
        size = (
            f"{counted(pack.tokens, 'token')}, {counted(pack.patches, 'patch')}, {pack.cost * 2**20 / 1e12:,.1f} TFLOP"
        )
        title = f"rank {pack.dp_rank}, micro-batch {pack.micro_batch}: {name}, {size}"
        console.print(Text(title, "bold"), soft_wrap=True)
        if not pack.samples:
            continue
        table = columns("", *names, left=("key", "dataset"))
        for sample in pack.samples:
            dataset = [data(Path(step.datasets[sample.dataset]).name)] if several else []
            cut = Text(" cut", "yellow") if sample.truncated else Text("")
            numbers = (sample.source_row, sample.length, sample.targets, sample.images, sample.patches, sample.repeat)
            add_row(table, *dataset, data(sample.key) + cut, *numbers)
        console.print(table)


def print_row(
    console: Console, trace: RowTrace, samples: Sequence[SampleDescription | None], tokens: bool = False
) -> None:
    """Prints the outcome of a source row, and each candidate's sample; None if rejected."""
    if len(trace.candidates) > 1:
        accepted = sum(sample is not None for sample in samples)
        rejected = len(samples) - accepted
        total = f"{accepted:,} of {counted(len(samples), 'sample')} accepted" + (
            f", {rejected:,} rejected" if rejected else ""
        )
        console.print(Text(f"source row {trace.source_row:,}: {total}", "bold"))
        console.print()
    for at, (candidate, sample) in enumerate(zip(trace.candidates, samples, strict=True)):
        if at:
            console.print()
        if sample is not None:
            print_sample(console, sample, tokens)
            _print_uses(console, candidate.uses)
            continue
        within = "" if candidate.sample is None else f", sample {candidate.sample}"
        console.print(
            facts(
                ("source row", f"{trace.source_row:,}{within}", f"of {trace.rows:,}"),
                *([] if candidate.place is None else [("in the source", data(candidate.place), "")]),
                ("rejected", data(candidate.reason, "yellow"), ""),
                ("because", data(candidate.message), ""),
            )
        )


def _print_uses(console: Console, uses: Sequence[RowUse]) -> None:
    for use in uses:
        where = f"epoch {use.epoch}, pack {use.pack}"
        if use.step is None:
            console.print(f"used in {where}, which is dropped with the incomplete last step")
        else:
            console.print(f"used in {where}: step {use.step}, rank {use.dp_rank}, micro-batch {use.micro_batch}")


def print_found(console: Console, samples: tuple[FoundSample, ...], total: int, most: int) -> None:
    """Prints at most ``most`` of the samples that a query found."""
    names = ("key", "row", "tokens", "targets", "", "images", "patches")
    table = columns(f"{len(samples):,} of {counted(total, 'sample')}", *names, left=("key",))
    for sample in samples[:most]:
        share = number(sample.targets / max(sample.length, 1), "share")
        counts = (sample.source_row, sample.length, sample.targets, share, sample.images, sample.patches)
        add_row(table, data(sample.key), *counts)
    console.print(table)
    if len(samples) > most:
        console.print(f"… and {len(samples) - most:,} more; --json lists them all")
