"""Counts the samples of rows with keys that the recipe did not use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from preprocess.conversation import Conversation, Document

#: Further keys are counted together, so that data with names or ids as keys cannot fill the manifest.
_MOST_KEYS = 200
_OTHERS = "(other keys)"
_LONGEST_KEY = 120


@dataclass(frozen=True)
class KeyCounts:
    """Number of samples by key.

    Attributes:
        unused: Harmless keys.
        unknown: Keys that the recipe does not know.
    """

    unused: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)

    def add(self, made: Conversation | Document) -> None:
        """Counts the unused keys of a sample."""
        for counter, keys in ((self.unused, made.unused), (self.unknown, made.unknown)):
            if keys:
                counter.update(key[:_LONGEST_KEY] for key in keys)

    def to_json(self) -> dict[str, dict[str, int]]:
        """Returns the JSON form, sorted by key."""
        return {"unused": dict(sorted(self.unused.items())), "unknown": dict(sorted(self.unknown.items()))}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> KeyCounts:
        """Restores counts from :meth:`to_json`."""
        return cls(Counter(fields["unused"]), Counter(fields["unknown"]))

    @classmethod
    def sum(cls, counts: Iterable[KeyCounts]) -> KeyCounts:
        """Sums the counts of a run. Of very many keys, keeps the most frequent."""
        total = cls()
        for each in counts:
            total.unused.update(each.unused)
            total.unknown.update(each.unknown)
        return cls(_limited(total.unused), _limited(total.unknown))


def _limited(counter: Counter[str]) -> Counter[str]:
    ordered = sorted(counter.items(), key=lambda item: (-item[1], item[0]))
    limited = Counter(dict(ordered[:_MOST_KEYS]))
    if len(ordered) > _MOST_KEYS:
        limited[_OTHERS] = sum(count for _, count in ordered[_MOST_KEYS:])
    return limited
