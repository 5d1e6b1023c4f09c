"""A fault found by an audit, and the remedies for faults."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from vlmdata.format.schema import IMAGE_FILES_NAME, INDEX_NAME, LEDGER_NAME, MANIFEST_NAME, TOKENIZER_DIR
from vlmdata.format.tokenizer_files import STRAY
from vlmdata.locations import within

#: Faults after which ``vlmdata preprocess`` recreates a shard by itself; it checks only sizes.
_NOTICED = frozenset({"missing", "size"})
_SHOWN = 5


@dataclass(frozen=True)
class Fault:
    """One fault."""

    file: str  # file name within the dataset
    check: str  # short name of the check that failed
    message: str  # what was found and what was expected
    row: int | None = None  # source row, if the fault belongs to a sample
    key: str | None = None  # sample key, if the fault belongs to a sample

    def __str__(self) -> str:
        where = self.file if self.key is None else f"{self.file} row {self.row} key {self.key}"
        return f"{where}: {self.check}: {self.message}"


def remedies(
    directory: str, faults: Iterable[Fault], joined: bool = False, selected: bool = False, version: bool = False
) -> list[str]:
    """Returns the repair steps of a dataset in order, one or two sentences each; empty without faults.

    Args:
        directory: Path or URL of the dataset, as the user gave it.
        faults: All faults of the audit.
        joined: Whether ``vlmdata join`` made the dataset. Then no source is known that could make its shards again.
        selected: The same of ``vlmdata select``.
        version: Whether it is a version after the first, whose files are not made again.
    """
    checks: dict[str, set[str]] = {}
    for fault in faults:
        checks.setdefault(fault.file, set()).add(fault.check)
    if joined or selected:
        return list(_steps_of_linked(directory, checks, selected))
    if version:
        return list(_steps_of_version(directory, checks))
    return list(_steps(directory, checks))


def _steps_of_linked(directory: str, checks: dict[str, set[str]], selected: bool) -> Iterator[str]:
    strays = [name for name, found in checks.items() if STRAY in found]
    if strays:
        yield f"Remove {first_names([f'{directory}/{name}' for name in strays])}."
    if len(strays) < len(checks) and selected:
        yield (
            "This dataset was selected from another, and its shards may be hard links to those of the other. Repair "
            f"the other first (`vlmdata verify` shows how), then remove {directory} and select again."
        )
    elif len(strays) < len(checks):
        yield (
            "This dataset was joined, and its shards may be hard links to those of the joined datasets. Repair these "
            f"datasets first (`vlmdata verify` shows how), then remove {directory} and join them again."
        )


def _steps_of_version(directory: str, checks: dict[str, set[str]]) -> Iterator[str]:
    strays = [name for name, found in checks.items() if STRAY in found]
    if strays:
        yield f"Remove {first_names([f'{directory}/{name}' for name in strays])}."
    if len(strays) < len(checks):
        yield (
            "Files of a version after the first are not made again. Restore these from a copy: "
            f"{first_names([within(directory, name) for name in checks if name not in strays])}. Or recreate the "
            "dataset: run its `vlmdata preprocess` command with --overwrite, which removes all versions."
        )


def _steps(directory: str, checks: dict[str, set[str]]) -> Iterator[str]:
    shards = {name: found for name, found in checks.items() if name.startswith("shard-")}
    strays = [name for name, found in checks.items() if STRAY in found]
    silent = [name for name, found in shards.items() if {"sha256", "unreadable"} & found and not _NOTICED & found]
    lost = [name for name, found in shards.items() if _NOTICED & found] + silent
    listed = (INDEX_NAME, LEDGER_NAME, IMAGE_FILES_NAME)
    lost += [name for name in listed if {"missing", "sha256"} & checks.get(name, set())]
    lost += [TOKENIZER_DIR] if any(name.startswith(f"{TOKENIZER_DIR}/") for name in checks.keys() - strays) else []
    explained = {*strays, *lost}
    others = [n for n in checks if n not in explained and n.partition("/")[0] not in explained and n != MANIFEST_NAME]
    if MANIFEST_NAME in checks:
        yield (
            f"Restore {directory}/{MANIFEST_NAME} from a copy, or recreate the dataset: run its `vlmdata preprocess` "
            "command with --overwrite."
        )
    if strays or silent:
        yield f"Remove {first_names([f'{directory}/{name}' for name in [*strays, *silent]])}."
    if lost:
        yield (
            "Run the dataset's `vlmdata preprocess` command again. It recreates these files and compares them with "
            f"the manifest: {first_names(lost)}."
        )
    if others and not (lost or MANIFEST_NAME in checks):
        yield (
            f"Recreate the dataset: run its `vlmdata preprocess` command with --overwrite. {first_names(others)} "
            f"{'has its' if len(others) == 1 else 'have their'} hash in the manifest, so the faults were written."
        )


def first_names(names: Sequence[str]) -> str:
    """Returns the first names, for a message."""
    rest = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest
