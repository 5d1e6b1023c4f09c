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
    from vlmdata.format.dataset import VlmDataset
    from vlmdata.inspect.edits import Edit
    from vlmdata.select.compare import ChangedSample, DatasetComparison


def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="Dataset directory or URL.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Dataset directory or URL.")],
    shown: Annotated[int, typer.Option("--shown", min=0, help="Number of samples to list of each kind.")] = 5,
    match: Annotated[
        str | None,
        typer.Option(
            "--match",
            metavar="id|COLUMN",
            help="Pair samples by the ids of their rows, or by a kept column of the source, and show old and new text "
            "and boxes of those that changed. Default: by key.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all differences as JSON.")] = False,
) -> None:
    """Compare the samples of two datasets by key and content.

    Content is what is trained on: tokens, targets, loss weights, positions and decoded pixels. A copy in another codec
    is equal. Only the indexes are read, with --match also the changed samples; `vlmdata verify` shows whether shards
    have what their index says.

    **Examples**

    - `vlmdata diff data/may data/june`

    - `vlmdata diff data/chat@1 data/chat --match id`

    - `vlmdata diff data/all data/selected --json | jq .only_first`

    **Exit codes**: 0 equal; 1 different; 2 not a dataset.
    """
    from vlmdata.select.compare import compare
    from vlmdata.storage.open import open_dataset

    datasets = open_dataset(first), open_dataset(second)
    found = compare(*datasets, match)
    edits = [] if match is None else _edits(datasets, found.changed[: None if as_json else shown])
    if as_json:
        described = {"edits": [dataclasses.asdict(edit) for edit in edits]} if match is not None else {}
        print(json.dumps({"equal_datasets": found.is_equal, **dataclasses.asdict(found), **described}, indent=2))
    else:
        _print(found, (datasets[0].name, datasets[1].name), shown, edits)
    raise typer.Exit(0 if found.is_equal else 1)


def _edits(datasets: tuple[VlmDataset, VlmDataset], changed: Sequence[ChangedSample]) -> list[Edit]:
    from vlmdata.inspect.edits import EditDescriber

    return list(map(EditDescriber(*datasets), changed)) if changed else []


def _edit_lines(edit: Edit) -> str:
    """Returns an edit with its old lines and boxes, marked ``-``, and its new ones, marked ``+``."""
    from vlmdata.inspect.text import visible

    marked = [("-", edit.old, edit.old_boxes), ("+", edit.new, edit.new_boxes)]
    lines = [f"    {mark} {visible(line)}" for mark, texts, _ in marked for line in texts]
    lines += [f"    {mark} box {visible(box)}" for mark, _, boxes in marked for box in boxes]
    name = "" if edit.id is None else f"id {visible(edit.id)}, "
    return "\n".join([f"{name}{' and '.join(dict.fromkeys(edit.keys))}: {', '.join(edit.parts)}", *lines])


def _print(found: DatasetComparison, names: tuple[str, str], shown: int, edits: Sequence[Edit]) -> None:
    for name, samples in zip(names, found.samples, strict=True):
        print(f"{name}: {counted(samples, 'sample')}")
    for setting, one, other in found.settings:
        print(f"{setting}: {one} in {names[0]}, {other} in {names[1]}")
    print(f"{found.equal:,} equal")
    parts = Counter(part for each in found.changed for part in each.parts)
    of = f" ({', '.join(f'{part} of {count:,}' for part, count in parts.items())})" if parts else ""
    lines = list(map(_edit_lines, edits)) + [
        f"{each.key}: {', '.join(each.parts)}" for each in found.changed[len(edits) :]
    ]
    _list(f"{len(found.changed):,} changed{of}", lines, shown)
    key = "key" if not edits else "id"
    moved = f" ({found.moved:,} of them in {names[1]} under another {key})" if found.moved else ""
    _list(f"{len(found.only_first):,} only in {names[0]}{moved}", found.only_first, shown)
    _list(f"{len(found.only_second):,} only in {names[1]}", found.only_second, shown)


def _list(heading: str, lines: Sequence[str], shown: int) -> None:
    print(heading)
    for line in lines[:shown]:
        print(f"  {line}")
    if len(lines) > shown > 0:
        print(f"  … and {len(lines) - shown:,} more; --json lists all")
