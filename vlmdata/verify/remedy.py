"""What to do about the faults of an audit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vlmdata.format.schema import IMAGE_FILES_NAME, INDEX_NAME, LEDGER_NAME, MANIFEST_NAME, TOKENIZER_DIR
from vlmdata.verify.fault import Fault

#: Faults after which ``vlmdata preprocess`` makes a shard again by itself: it looks at sizes alone.
_NOTICED = frozenset({"missing", "size"})
_SHOWN = 5


def remedies(directory: str, faults: Iterable[Fault]) -> list[str]:
    """Steps that mend a dataset, in their order, one sentence or two each; empty without faults.

    Args:
        directory: The dataset, as the user named it.
        faults: All that the audit found.
    """
    checks: dict[str, set[str]] = {}
    for fault in faults:
        checks.setdefault(fault.file, set()).add(fault.check)
    return list(_steps(directory, checks))


def _steps(directory: str, checks: dict[str, set[str]]) -> Iterator[str]:
    shards = {name: found for name, found in checks.items() if name.startswith("shard-")}
    strays = [name for name, found in shards.items() if "stray" in found]
    silent = [name for name, found in shards.items() if {"sha256", "unreadable"} & found and not _NOTICED & found]
    lost = [name for name, found in shards.items() if _NOTICED & found] + silent
    listed = (INDEX_NAME, LEDGER_NAME, IMAGE_FILES_NAME)
    lost += [name for name in listed if {"missing", "sha256"} & checks.get(name, set())]
    lost += [TOKENIZER_DIR] if any(name.startswith(f"{TOKENIZER_DIR}/") for name in checks) else []
    explained = {*strays, *lost}
    others = [n for n in checks if n not in explained and n.partition("/")[0] not in explained and n != MANIFEST_NAME]
    if MANIFEST_NAME in checks:
        yield (
            f"Restore {directory}/{MANIFEST_NAME} from a copy, or make the dataset anew: run its `vlmdata preprocess` "
            "command with --overwrite."
        )
    if strays or silent:
        yield f"Remove {_listed([f'{directory}/{name}' for name in [*strays, *silent]])}."
    if lost:
        yield (
            f"Run the `vlmdata preprocess` command that made the dataset once more. It makes again, and "
            f"compares with the manifest: {_listed(lost)}."
        )
    if others and not (lost or MANIFEST_NAME in checks):
        yield (
            f"Make the dataset anew: run its `vlmdata preprocess` command with --overwrite. {_listed(others)} "
            f"{'has' if len(others) == 1 else 'have'} the hash that the manifest names, so the faults were written."
        )


def _listed(names: list[str]) -> str:
    rest = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest
