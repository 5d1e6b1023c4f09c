"""``vlmdata verify``: checks a dataset and lists its faults."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from vlmdata.errors import ResourceError
from vlmdata.wording import counted, duration

if TYPE_CHECKING:
    from rich.console import Console

    from vlmdata.verify.remote import FetchedShards

#: Number of fault lines to print; ``--json`` prints all.
_SHOWN = 50


class Checks(StrEnum):
    """What of images is checked."""

    STORED = "stored"
    PIXELS = "pixels"


def verify(
    data: Annotated[str, typer.Argument(metavar="DIR", help="Dataset directory or fsspec URL.")],
    check: Annotated[
        Checks,
        typer.Option(
            help="What of images is checked: the stored bytes, or also the pixels that they decode to (slower with "
            "`jxl` and `source`)."
        ),
    ] = Checks.PIXELS,
    workers: Annotated[int | None, typer.Option("--workers", "-j", help="Processes. Default: one per core.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result with all faults as JSON.")] = False,
) -> None:
    """Re-hash every shard, check index, ledger and tokenizer, audit every sample, and print how to repair faults.

    For each sample: targets exist, are in assistant turns after the header, and run unbroken to the end of the turn;
    each target turn has one end token among the targets; no pad, vision or header token is a target; no image block is
    cut; patches and positions match the grids. In a document, all text is a target, and an end-of-text token ends it.

    Added shards and files added to the tokenizer are faults, because readers would use them. Other files that are no
    part of the dataset are named, and are no faults.

    **Examples**

    - `vlmdata verify build/demo`

    - `vlmdata verify data/cord --check stored` (a copy arrived whole; decodes nothing)

    - `vlmdata verify data/cord --json | jq .faults`

    - `vlmdata verify s3://bucket/cord` (downloads each shard once; needs space for one shard per process)

    **Exit codes**: 0 no faults; 1 faults found; 2 not a dataset.
    """
    from vlmdata.cli.console import counting_bar, messages, results
    from vlmdata.format.manifest import Manifest
    from vlmdata.format.schema import JOINED, SELECTED
    from vlmdata.locations import is_url
    from vlmdata.machine import available_cores
    from vlmdata.storage.versions import place_of_version
    from vlmdata.verify.dataset import verify_dataset
    from vlmdata.verify.fault import first_names, remedies
    from vlmdata.verify.remote import auditable, named, remedies_at

    talk, begun, place = messages(), time.monotonic(), place_of_version(data)
    with auditable(place) as (directory, open_shard), counting_bar(talk) as bar:
        manifest = Manifest.read(directory)
        shards, kind = len(manifest.shards), manifest.source.get("kind")
        task = bar.add_task("shards", total=shards)
        audit = verify_dataset(
            directory,
            # Other processes cannot read an in-memory dataset of this process.
            workers=1 if place.startswith("memory://") else workers or available_cores(),
            pixels=check is Checks.PIXELS,
            on_shard=lambda result: bar.advance(task),
            open_shard=open_shard,
            listing=_listing(open_shard, talk),
        )
    seconds = time.monotonic() - begun
    audit = named(audit, directory, place)
    made = (kind == JOINED, kind == SELECTED, bool(manifest.version))
    steps = (remedies_at if is_url(place) else remedies)(place, audit.faults, *made)
    if as_json:
        fields = {
            "directory": place,
            "sound": not audit.faults,
            "checked": check.value,
            "samples": audit.samples,
            "shards": shards,
            "bytes": audit.bytes,
            "faults": [dataclasses.asdict(fault) for fault in audit.faults],
            "foreign": audit.foreign,
            "remedies": steps,
        }
        print(json.dumps(fields, indent=2))
    else:
        out = results(soft_wrap=True)
        for fault in audit.faults[:_SHOWN]:
            out.print(str(fault), markup=False)
        if len(audit.faults) > _SHOWN:
            out.print(f"… and {len(audit.faults) - _SHOWN:,} more; --json lists them all")
        if audit.foreign:
            out.print(f"not part of the dataset, and not checked: {first_names(audit.foreign)}", markup=False)
        size = f"{counted(audit.samples, 'sample')}, {counted(shards, 'shard')}, {audit.bytes / 1e6:,.1f} MB"
        verdict = f"[bold red]{counted(len(audit.faults), 'fault')}[/]" if audit.faults else "[bold green]sound[/]"
        out.print(f"{verdict}: {size} in {duration(seconds)}")
        for step in steps:
            out.print(f"next: {step}", markup=False)
    raise typer.Exit(1 if audit.faults else 0)


def _listing(shards: FetchedShards | None, talk: Console) -> Sequence[str] | None:
    """Returns the names of the files at a URL. If it cannot be listed, says so."""
    if shards is None:
        return None
    try:
        return shards.names()
    except ResourceError as error:
        talk.print(f"{error}. Shards that are not in the manifest are not looked for.", markup=False, soft_wrap=True)
        return ()
