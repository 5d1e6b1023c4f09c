"""``vlmdata prune``: removes old versions of a dataset."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from vlmdata.wording import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vlmdata.storage.prune import PrunePlan


def prune(
    data: Annotated[str, typer.Argument(metavar="DIR", help="Dataset: folder or URL.")],
    versions: Annotated[
        list[int] | None, typer.Argument(metavar="[VERSION]...", help="Numbers of the versions to remove.")
    ] = None,
    keep: Annotated[
        int | None, typer.Option(min=1, help="Keep so many of the newest versions and remove the others.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be removed, with bytes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Remove old versions of a dataset, and the shards that no other version has. The newest version stays.

    A run that was trained on a removed version cannot be resumed.

    **Examples**

    - `vlmdata prune data/chat --keep 2 --dry-run`

    - `vlmdata prune data/chat 1 2`

    **Exit codes**: 0 done; 2 no such version, or the newest; 3 another command is at work in the dataset.
    """
    from vlmdata.errors import UsageError
    from vlmdata.storage import open_store
    from vlmdata.storage.prune import listed_versions, plan_prune
    from vlmdata.storage.prune import prune as remove

    if bool(versions) == (keep is not None):
        raise UsageError("give the versions to remove, such as `vlmdata prune DIR 1 2`, or --keep N for the newest N")
    store = open_store(data)
    numbers = versions or [each.number for each in listed_versions(store)[: -(keep or 0)]]
    plan = (plan_prune if dry_run else remove)(store, numbers)
    if as_json:
        fields = {
            "directory": str(store),
            "removed": [each.number for each in plan.removed],
            "left": [each.number for each in plan.left],
            "files": dict(plan.files),
            "bytes": plan.bytes,
            "dry_run": dry_run,
        }
        print(json.dumps(fields, indent=2))
    else:
        _print(plan, str(store), dry_run)


def _print(plan: PrunePlan, place: str, dry_run: bool) -> None:
    would = "would be removed" if dry_run else "removed"
    if not plan.files and not plan.removed:
        print(f"{place}: nothing to remove")
        return
    for name, size in plan.files.items():
        print(f"{size:>18,}  {name}")
    removed, left = (_numbers([each.number for each in versions]) for versions in (plan.removed, plan.left))
    files = counted(len(plan.files), "file")
    print(f"{place}: {removed} {would}: {files}, {plan.bytes / 1e6:,.1f} MB. Left: {left}.")


def _numbers(numbers: Sequence[int]) -> str:
    return f"version{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}" if numbers else "remains"
