"""``vlmdata verify``: prove a dataset whole, or say precisely what is wrong."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Annotated

import typer

from vlmdata.wording import counted, duration

#: Fault lines printed; ``--json`` gives them all.
_SHOWN = 50


def verify(
    data: Annotated[str, typer.Argument(metavar="DIR", help="Dataset directory or fsspec URL.")],
    workers: Annotated[int | None, typer.Option("--workers", "-j", help="Processes. Default: one per core.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result, every fault in it, as JSON.")] = False,
) -> None:
    """Re-hash every shard, check index, ledger and tokenizer, and audit every sample; print how to repair faults.

    For each sample: targets exist and lie in assistant turns, after the header, unbroken to the end; there are as many
    end tokens among the targets as turns; no pad, vision or header token is a target; no image block is cut; patches
    match the grids; positions follow from the grids. In a document all text is a target, and the end of text ends it.

    **Examples**

    - `vlmdata verify build/demo`

    - `vlmdata verify data/cord --json | jq .faults`

    - `vlmdata verify s3://bucket/cord` (fetches each shard once; needs room for one shard per process)

    **Exit codes**: 0 sound; 1 faults found; 2 not a dataset.
    """
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    from vlmdata.cli.machine import available_cores
    from vlmdata.format.manifest import Manifest
    from vlmdata.locations import is_url, place_of
    from vlmdata.verify.dataset import verify_dataset
    from vlmdata.verify.remedy import remedies
    from vlmdata.verify.remote import auditable, named, remedies_at

    talk = Console(stderr=True, highlight=False)
    begun = time.monotonic()
    place = place_of(data)
    bar = Progress(*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn(), console=talk)
    bar.disable = not talk.is_terminal
    with auditable(place) as (directory, open_shard), bar:
        shards = len(Manifest.read(directory).shards)
        task = bar.add_task("shards", total=shards)
        audit = verify_dataset(
            directory,
            # Other processes do not see what is in this one's memory.
            workers=1 if place.startswith("memory://") else workers or available_cores(),
            on_shard=lambda result: bar.advance(task),
            open_shard=open_shard,
        )
    seconds = time.monotonic() - begun
    audit = named(audit, directory, place)
    steps = remedies_at(place, audit.faults) if is_url(place) else remedies(place, audit.faults)
    if as_json:
        fields = {
            "directory": place,
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
