"""Counts of samples by name: unused keys, reasons of rejection, what the template did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

#: Further keys are counted together, so that data with names or ids as keys cannot fill the manifest.
_MOST_KEYS = 200
_OTHERS = "(other keys)"
_LONGEST_KEY = 120


def shortened(keys: Iterable[str]) -> list[str]:
    """Returns keys as they are counted."""
    return [key[:_LONGEST_KEY] for key in keys]


def summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Sums counts, sorted by name."""
    total = Counter[str]()
    for each in counts:
        total.update(each)
    return dict(sorted(total.items()))


def most_frequent(counts: Mapping[str, int]) -> dict[str, int]:
    """Returns the counts of the most frequent keys, and of all others together, sorted by name."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    others = sum(count for _, count in ordered[_MOST_KEYS:])
    return dict(sorted([*ordered[:_MOST_KEYS], *([(_OTHERS, others)] if others else [])]))
