"""``vlmdata verify``: prove a dataset whole, or say precisely what is wrong."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Annotated

import typer

from vlmdata.wording import counted, duration

#: Fault lines printed; ``--json`` gives them all.
_SHOWN = 50


def verify(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Dataset directory.")],
    workers: Annotated[int | None, typer.Option("--workers", "-j", help="Processes. Default: one per core.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result, every fault in it, as JSON.")] = False,
) -> None:
    """Re-hash every shard, check index, ledger and tokenizer, and audit every sample; say what mends the faults.

    Of each sample: targets exist and lie in assistant turns, after the header, unbroken to the end; the supervised
    end tokens equal the turns; no pad, vision or header token is a target; no image block is cut; patches match the
    grids; positions are what the grids imply. In a document all text is a target, and the end of text ends it.

    **Examples**

    - `vlmdata verify build/demo`

    - `vlmdata verify data/cord --json | jq .faults`

    **Exit codes**: 0 sound; 1 faults found; 2 not a dataset.
    """
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    from vlmdata.cli.machine import available_cores
    from vlmdata.format.manifest import Manifest
    from vlmdata.verify.dataset import verify_dataset
    from vlmdata.verify.remedy import remedies

    talk = Console(stderr=True, highlight=False)
    begun = time.monotonic()
    shards = len(Manifest.read(directory).shards)
    bar = Progress(*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn(), console=talk)
    bar.disable = not talk.is_terminal
    with bar:
        task = bar.add_task("shards", total=shards)
        audit = verify_dataset(
            directory, workers=workers or available_cores(), on_shard=lambda result: bar.advance(task)
        )
    seconds = time.monotonic() - begun
    steps = remedies(str(directory), audit.faults)
    if as_json:
        fields = {
            "directory": str(directory),
            "sound": not audit.faults,
            "samples": audit.samples,
            "shards": shards,
            "bytes": audit.bytes,
            "faults": [dataclasses.asdict(fault) for fault in audit.faults],
            "remedies": steps,
        }
        print(json.dumps(fields, indent=2))
    else:
        out = Console(highlight=False, soft_wrap=True)
        for fault in audit.faults[:_SHOWN]:
            out.print(str(fault), markup=False)
        if len(audit.faults) > _SHOWN:
            out.print(f"… and {len(audit.faults) - _SHOWN:,} more; --json lists them all")
        size = f"{counted(audit.samples, 'sample')}, {counted(shards, 'shard')}, {audit.bytes / 1e6:,.1f} MB"
        verdict = f"[bold red]{counted(len(audit.faults), 'fault')}[/]" if audit.faults else "[bold green]sound[/]"
        out.print(f"{verdict}: {size} in {duration(seconds)}")
        for step in steps:
            out.print(f"next: {step}", markup=False)
    raise typer.Exit(1 if audit.faults else 0)
