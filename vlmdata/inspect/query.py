"""Searches for samples, by conditions on the index for all samples at once, and by text for a few samples at a time.

A query is the text of the search box, such as ``target<5% patches>4000 is:truncated invoice``. Words of the form
field, comparison, number are conditions. The other words together are text to find in the key or the decoded sample.
"""

from __future__ import annotations

import operator
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vlmdata.errors import NotFoundError, UsageError
from vlmdata.format.dataset import VlmDataset
from vlmdata.format.index import DatasetIndex
from vlmdata.inspect.findings import KINDS, IndexFindings, Severity
from vlmdata.inspect.tokens import TokenTexts
from vlmdata.packing.arrays import IntArray

_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
}
_Column = Callable[[IndexFindings], npt.NDArray[Any]]
_COLUMNS: dict[str, _Column] = {
    "target": lambda facts: facts.target_shares,
    "targets": lambda facts: facts.index.num_targets,
    "length": lambda facts: facts.index.lengths,
    "patches": lambda facts: facts.index.num_patches,
    "images": lambda facts: facts.index.item_counts,
    "row": lambda facts: facts.index.source_row,
    "turns": lambda facts: facts.index.target_turns,
}
_ORDERS: dict[str, _Column] = {
    "longest": lambda facts: -facts.index.lengths.astype(np.int64),
    "shortest": lambda facts: facts.index.lengths,
    "patches": lambda facts: -facts.index.num_patches.astype(np.int64),
    "target": lambda facts: facts.target_shares,
}
#: Fields of conditions. "target" is a share; the others are whole numbers.
FIELDS = tuple(_COLUMNS)
FLAGS = ("is:truncated", "is:suspicious")
SORTS = ("stored", *_ORDERS)
_TERM = re.compile(rf"({'|'.join(FIELDS)})(<=|>=|<|>|=)([0-9][0-9,_]*\.?[0-9]*)(%?)")


@dataclass(frozen=True)
class Condition:
    """A condition ``field operator value``; shares are fractions of 1."""

    field: str
    operator: str
    value: float


@dataclass(frozen=True)
class Query:
    """A search; all of its parts must hold."""

    conditions: tuple[Condition, ...] = ()  # on index columns
    flags: tuple[str, ...] = ()  # of FLAGS
    text: str = ""  # to find, ignoring case; "" for none
    sort: str = "stored"  # one of SORTS


@dataclass(frozen=True)
class Hits:
    """A part of the search results."""

    samples: tuple[int, ...]  # positions found
    searched: int  # number of candidates searched, from the start of the order
    candidates: int  # samples that meet the conditions
    done: bool  # whether all candidates were searched


def parse_query(text: str, sort: str = "stored") -> Query:
    """Parses conditions and words.

    Raises:
        UsageError: If the order is unknown, or a word looks like a condition on an unknown field.
    """
    if sort not in SORTS:
        raise UsageError(f"sort {sort!r}: choose one of {', '.join(SORTS)}")
    conditions, flags, words = [], [], []
    for word in text.split():
        match = _TERM.fullmatch(word)
        if match:
            field, comparison, value, percent = match.groups()
            number = float(value.replace(",", "").replace("_", ""))
            conditions.append(Condition(field, comparison, number / 100 if percent else number))
        elif word in FLAGS:
            flags.append(word)
        elif re.fullmatch(r"[a-z]+(<=|>=|<|>|=)[0-9].*|is:.*", word):
            raise UsageError(
                f"{word!r}: conditions are FIELD<NUMBER with <, <=, >, >= or =, for the fields {', '.join(FIELDS)} "
                f"(target also as 5%), and {', '.join(FLAGS)}"
            )
        else:
            words.append(word)
    return Query(tuple(conditions), tuple(flags), " ".join(words), sort)


def candidates(facts: IndexFindings, query: Query, suspicious: Sequence[int] = ()) -> IntArray:
    """Returns the positions of samples that meet the conditions, int64 (m,), in the query's order.

    Text is ignored, unless it is a complete key: then that sample is the only candidate. ``suspicious`` are positions
    of further suspicious samples, not found by the index.
    """
    index = facts.index
    chosen = np.ones(len(index), np.bool_)
    for condition in query.conditions:
        chosen &= _OPERATORS[condition.operator](_COLUMNS[condition.field](facts), condition.value)
    if "is:truncated" in query.flags:
        chosen &= index.truncated
    if "is:suspicious" in query.flags:
        marked = np.zeros(len(index), np.bool_)
        marked[list(suspicious)] = True
        for kind, where in facts.groups.items():
            if KINDS[kind][0] is not Severity.NOTE:
                marked[where] = True
        chosen &= marked
    if query.text and (named := _named(index, query.text)) is not None:
        chosen[:named] = chosen[named + 1 :] = False
    found = np.flatnonzero(chosen)
    if query.sort == "stored":
        return found
    values = _ORDERS[query.sort](facts)
    return found[np.argsort(values[found], kind="stable")]


def _named(index: DatasetIndex, text: str) -> int | None:
    try:
        return index.position_of(text)
    except NotFoundError:
        return None


def search(
    dataset: VlmDataset,
    texts: TokenTexts,
    order: IntArray,
    text: str,
    *,
    start: int = 0,
    limit: int = 50,
    seconds: float | None = None,
) -> Hits:
    """Searches samples in order, int64 (m,) positions, from the end of the previous search.

    Finds text in key or decoded text, ignoring case; "" matches all samples. ``start`` is the number of samples already
    searched, ``limit`` the largest number of hits. The time limit in seconds is checked after each sample.
    """
    found: list[int] = []
    wanted, at = text.casefold(), start
    deadline = None if seconds is None else time.monotonic() + seconds
    while at < len(order) and len(found) < limit:
        i = int(order[at])
        at += 1
        if not wanted or wanted in dataset.index.key(i) or wanted in sample_text(dataset, texts, i).casefold():
            found.append(i)
        if deadline is not None and time.monotonic() > deadline:
            break
    return Hits(tuple(found), at, len(order), at >= len(order))


def sample_text(dataset: VlmDataset, texts: TokenTexts, i: int) -> str:
    """Decodes the text of a sample, with each run of image tokens as one token."""
    sample = dataset.as_stored(i, pixels=False)
    ids = sample.input_ids[: sample.length]
    repeated = np.zeros(len(ids), np.bool_)
    repeated[1:] = (ids[1:] == ids[:-1]) & (ids[1:] == dataset.manifest.tokenizer.image)
    return texts.decode(ids[~repeated].tolist())
