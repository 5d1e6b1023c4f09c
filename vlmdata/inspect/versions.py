"""The versions of a dataset, and what changed between two of them."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from vlmdata.errors import UsageError
from vlmdata.format.dataset import VlmDataset
from vlmdata.inspect.page.payload import safe
from vlmdata.select.compare import DatasetComparison, compare
from vlmdata.storage.open import open_dataset
from vlmdata.storage.versions import folder_of, split_version, versions_at

#: Samples of each kind that the page lists; ``vlmdata diff --json`` lists all.
_LISTED = 200


@dataclass(frozen=True)
class VersionDescription:
    """A version of a dataset.

    Attributes:
        number: From 1.
        parent: Number of the version before it; None for the first, and if the parent was pruned.
        parent_fingerprint: Fingerprint of the parent's manifest; None for the first.
        fingerprint: Fingerprint of its manifest.
        samples: Number of samples.
        shards: Number of shards.
        shards_added: Shards that the parent does not have; None if there is no parent to compare with.
        shards_removed: Shards that only the parent has; None as before.
        rows: Rows ``kept``, ``made`` and ``removed`` since the parent; empty for the first.
    """

    number: int
    parent: int | None
    parent_fingerprint: str | None
    fingerprint: str
    samples: int
    shards: int
    shards_added: int | None
    shards_removed: int | None
    rows: dict[str, int]


class VersionHistory:
    """The versions of a dataset, of which one is shown. Reads manifests and indexes, no shards."""

    def __init__(self, dataset: VlmDataset):
        self._shown = dataset
        self._place, _ = split_version(dataset.name)
        self._numbers = [each.number for each in versions_at(self._place)] or [_number(dataset)]

    def describe(self) -> tuple[VersionDescription, ...]:
        """Describes all versions, oldest first.

        Raises:
            DatasetFormatError: If a version is damaged.
        """
        datasets = [self._opened(number) for number in self._numbers]
        numbers = {each.manifest.fingerprint: number for number, each in zip(self._numbers, datasets, strict=True)}
        files = {number: _files(number, each) for number, each in zip(self._numbers, datasets, strict=True)}
        found = []
        for number, dataset in zip(self._numbers, datasets, strict=True):
            manifest = dataset.manifest
            fingerprint = manifest.version.get("parent")
            parent = None if fingerprint is None else numbers.get(fingerprint)
            found.append(
                VersionDescription(
                    number=number,
                    parent=parent,
                    parent_fingerprint=fingerprint,
                    fingerprint=manifest.fingerprint,
                    samples=len(dataset),
                    shards=len(manifest.shards),
                    shards_added=None if parent is None else len(files[number] - files[parent]),
                    shards_removed=None if parent is None else len(files[parent] - files[number]),
                    rows=dict(manifest.version.get("rows", {})),
                )
            )
        return tuple(found)

    def compare(self, first: int, second: int) -> DatasetComparison:
        """Returns what changed between two versions, as ``vlmdata diff`` does.

        Raises:
            UsageError: If there is no such version.
        """
        for number in (first, second):
            if number not in self._numbers:
                listed = ", ".join(map(str, self._numbers))
                raise UsageError(f"{self._place}: has no version {number}; it has {listed}")
        return compare(self._opened(first), self._opened(second))

    def page(self) -> dict[str, Any]:
        """Returns the versions for the page, and the number of the one that it shows."""
        return {
            "place": safe(self._place),
            "shown": _number(self._shown),
            "versions": [asdict(each) for each in self.describe()],
        }

    def comparison(self, first: int, second: int) -> dict[str, Any]:
        """Returns :meth:`compare` for the page: at most 200 samples of each kind, and positions of those it shows."""
        found = self.compare(first, second)
        parts = {each.key: each.parts for each in found.changed}
        return {
            "first": first,
            "second": second,
            "samples": found.samples,
            "equal": found.equal,
            "moved": found.moved,
            "settings": safe([list(each) for each in found.settings]),
            "changed": self._listed(list(parts), parts),
            "only_first": self._listed(found.only_first),
            "only_second": self._listed(found.only_second),
        }

    def neighbours(self) -> list[dict[str, Any]]:
        """Returns :meth:`comparison` of each version with the one listed before it."""
        return [self.comparison(first, second) for first, second in pairwise(self._numbers)]

    def _listed(self, keys: Sequence[str], parts: dict[str, tuple[str, ...]] | None = None) -> dict[str, Any]:
        listed = keys[:_LISTED]
        at = _positions(self._shown, listed)
        samples = [{"key": safe(key), "index": at.get(key), "parts": (parts or {}).get(key, ())} for key in listed]
        return {"count": len(keys), "samples": samples}

    def _opened(self, number: int) -> VlmDataset:
        return self._shown if number == _number(self._shown) else open_dataset(self._place, version=number)


def _number(dataset: VlmDataset) -> int:
    return int(dataset.manifest.version.get("number", 1))


def _files(number: int, dataset: VlmDataset) -> set[str]:
    """Returns the names of a version's shards, relative to the folder of the dataset."""
    folder = folder_of(number)
    return {posixpath.normpath(posixpath.join(folder, shard.name)) for shard in dataset.manifest.shards}


def _positions(dataset: VlmDataset, keys: Iterable[str]) -> dict[str, int]:
    wanted = set(keys)
    return {key: i for i, key in enumerate(dataset.index.keys.to_pylist()) if key in wanted}
