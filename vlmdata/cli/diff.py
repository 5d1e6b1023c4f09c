"""``vlmdata diff``: lists what differs between two datasets."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from vlmdata.wording import counted

if TYPE_CHECKING:
    from vlmdata.select.compare import DatasetComparison


def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="Dataset directory or URL.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Dataset directory or URL.")],
    shown: Annotated[int, typer.Option("--shown", min=0, help="Number of samples to list of each kind.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print all differences as JSON.")] = False,
) -> None:
    """Compare the samples of two datasets by key and content.

    Content is what is trained on: tokens, targets, loss weights, positions and decoded pixels. A copy in another codec
    is equal. Only the indexes are read; `vlmdata verify` shows whether shards have what their index says.

    **Examples**

    - `vlmdata diff data/may data/june`

    - `vlmdata diff data/all data/selected --json | jq .only_first`

    **Exit codes**: 0 equal; 1 different; 2 not a dataset.
    """
    from vlmdata.select.compare import compare
    from vlmdata.storage.open import open_dataset

    datasets = open_dataset(first), open_dataset(second)
    found = compare(*datasets)
    if as_json:
        print(json.dumps({"equal_datasets": found.is_equal, **dataclasses.asdict(found)}, indent=2))
    else:
        _print(found, (datasets[0].name, datasets[1].name), shown)
    raise typer.Exit(0 if found.is_equal else 1)


def _print(found: DatasetComparison, names: tuple[str, str], shown: int) -> None:
    for name, samples in zip(names, found.samples, strict=True):
        print(f"{name}: {counted(samples, 'sample')}")
    for setting, one, other in found.settings:
        print(f"{setting}: {one} in {names[0]}, {other} in {names[1]}")
    print(f"{found.equal:,} equal")
    parts = Counter(part for each in found.changed for part in each.parts)
    of = f" ({', '.join(f'{part} of {count:,}' for part, count in parts.items())})" if parts else ""
    _list(
        f"{len(found.changed):,} changed{of}", [f"{each.key}: {', '.join(each.parts)}" for each in found.changed], shown
    )
    moved = f" ({found.moved:,} of them in {names[1]} under another key)" if found.moved else ""
    _list(f"{len(found.only_first):,} only in {names[0]}{moved}", found.only_first, shown)
    _list(f"{len(found.only_second):,} only in {names[1]}", found.only_second, shown)


def _list(heading: str, lines: Sequence[str], shown: int) -> None:
    print(heading)
    for line in lines[:shown]:
        print(f"  {line}")
    if len(lines) > shown > 0:
        print(f"  … and {len(lines) - shown:,} more; --json lists all")
