"""Compares a run with the run that it would continue, and says what helps if they differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from preprocess.shards.fingerprints import as_recorded
from vlmdata.format.manifest import differences

_TOUCHED = (
    "(source files were touched since the run began; whether their bytes changed is known only of runs that began with "
    "--hash-source. Copies that keep the times, as cp -p and rsync -t make them, do.)"
)
_OTHER_MARKS = "(runs of earlier versions, and with --hash-source, know a source by its bytes: give --hash-source)"
#: What helps for a difference, by the beginning of its line; the first that fits.
_REMEDIES = (
    ("config.options", "repeat the earlier options"),
    ("config.fingerprints.recipe", "restore the recipe's code"),
    ("config.fingerprints.family_source", "restore the code of the family's rules"),
    ("config.fingerprints.codec_source", "restore the codec's code"),
    ("config.fingerprints.tokenizer", "restore the tokenizer's files"),
    ("config.fingerprints.chat_template", "restore the tokenizer's files"),
    ("tokenizer", "restore the tokenizer's files"),
    ("config.fingerprints", "install the earlier versions"),
    ("source", "restore the source"),
)
_ADDED = (
    "To add rows to a dataset, make a second one of the new rows alone: a loader reads a list of datasets, and "
    "`vlmdata join` makes one of several."
)


def identity_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Lists the differences between two runs' identities, one line each; empty if one can continue the other.

    Ignores what earlier versions did not record.
    """
    known = dict(now)
    if "source_times" not in before:
        known.pop("source_times", None)
    if "tokenizer" not in before:
        del known["tokenizer"]
    else:
        known["tokenizer"] = {name: value for name, value in now["tokenizer"].items() if name in before["tokenizer"]}
    known["config"] = as_recorded(now["config"], before.get("config", {}))
    return differences(before, json.loads(json.dumps(known)))


def refusal(
    place: object, state: str, changed: Sequence[str], before: Mapping[str, Any], now: Mapping[str, Any]
) -> str:
    """Says that a run cannot be continued, with the differences and what helps.

    Args:
        place: The dataset.
        state: What it has: ``an unfinished run``.
        changed: Result of :func:`identity_changes`.
        before: Identity of the earlier run.
        now: Identity of this run.
    """
    lines = list(changed)
    same_source = before.get("source") == json.loads(json.dumps(now["source"]))
    if same_source and any(line.startswith("source_times") for line in changed):
        lines.append(_TOUCHED)
    elif _other_marks(before.get("source"), now["source"]):
        lines.append(_OTHER_MARKS)
    listed = "\n".join(f"  {line}" for line in lines)
    # Another recipe, codec, family or tokenizer has other fingerprints too.
    options = any(line.startswith("config.options") for line in changed)
    follow = ("config.fingerprints", "tokenizer") if options else ()
    remedy = " and ".join(dict.fromkeys(_remedy(line) for line in changed if not line.startswith(follow)))
    added = "" if same_source else f"\n{_ADDED}"
    return (
        f"{place}: contains {state} of another configuration:\n{listed}\n{remedy[:1].upper()}{remedy[1:]} to continue "
        f"it, give another --out, or use --overwrite to start over.{added}"
    )


def _remedy(line: str) -> str:
    return next((remedy for beginning, remedy in _REMEDIES if line.startswith(beginning)), "repeat the earlier command")


def _other_marks(before: Any, now: Mapping[str, Any]) -> bool:
    """True if two identities of a source may be of the same files, known by other marks."""
    files, others = (side.get("files") if isinstance(side, Mapping) else None for side in (before, now))
    if not files or not others or len(files) != len(others):
        return False
    told = ("name", "bytes")
    same = all(one.get(name) == other.get(name) for one, other in zip(files, others, strict=True) for name in told)
    kinds = [{name for file in side for name in file if name not in told} for side in (files, others)]
    return same and kinds[0] != kinds[1]
