"""``vlmdata join``: makes one dataset of several, with the same shards."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer


def join(
    data: Annotated[list[str], typer.Argument(metavar="DIR…", help="Finished datasets, in this order.")],
    out: Annotated[str, typer.Option("--out", "-o", help="Folder or URL of the new dataset.")],
    allow_duplicates: Annotated[
        bool, typer.Option("--allow-duplicates", help="Join datasets that repeat each other's samples.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Join finished datasets of one family and tokenizer into one. The datasets stay unchanged.

    The new dataset has the same shards, byte for byte. On one file system they are hard links. Within an object store,
    the store copies them; otherwise this machine does. Index, ledger and manifest are new. A loader can also read
    several datasets without joining them (`vlmdata train --data A --data B`); join them to have one folder and
    fingerprint.

    **Examples**

    - `vlmdata join data/may data/june --out data/summer`

    - `vlmdata join s3://bucket/may s3://bucket/june --out s3://bucket/summer`

    **Exit codes**: 0 done; 2 the datasets are damaged, do not fit together or share samples, or --out is not empty; 3
    out of space.
    """
    import json

    from vlmdata.cli.console import counting_bar, messages
    from vlmdata.storage import open_store
    from vlmdata.storage.join import join_datasets
    from vlmdata.storage.linked import describe
    from vlmdata.storage.versions import place_of_version

    with counting_bar(messages(), time_left=False) as bar:
        task = bar.add_task("shards")
        result = join_datasets(
            [open_store(place_of_version(place)) for place in data],
            open_store(out),
            allow_duplicates=allow_duplicates,
            on_shard=lambda done, shards: bar.update(task, completed=done, total=shards),
        )
    totals = result.manifest.totals
    if as_json:
        fields = {
            "directory": str(open_store(out)),
            "fingerprint": result.manifest.fingerprint,
            "rows": totals.rows,
            "samples": totals.samples,
            "bytes": totals.bytes,
            "shards": {how.name.lower(): count for how, count in result.transferred.items()},
        }
        print(json.dumps(fields, indent=2))
        return
    print(f"{open_store(out)}: {totals.samples:,} samples of {totals.rows:,} rows, {totals.bytes / 1e6:,.1f} MB")
    print(describe(result.transferred))
    print(f"next: vlmdata verify {shlex.quote(str(open_store(out)))}")
