"""What differs between two datasets: samples only in one, and samples with the same key and other content.

Only the indexes are read. Content is what is trained on, as decoded: tokens, targets, weights, positions, pixels. So a
dataset and its copy in another codec are equal.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass

import numpy as np

from vlmdata.format.dataset import VlmDataset
from vlmdata.format.tokenizer_info import flat
from vlmdata.select.content import PARTS, combined, digests


@dataclass(frozen=True)
class ChangedSample:
    """A sample with the same key in both datasets, and other content."""

    key: str
    parts: tuple[str, ...]  # what differs: names of ``content.PARTS``


@dataclass(frozen=True)
class DatasetComparison:
    """The differences of two datasets. Keys are in the order of the index.

    Attributes:
        samples: Number of samples of each.
        equal: Number of samples with the same key and content.
        changed: Samples with the same key and other content.
        only_first: Keys that only the first dataset has.
        only_second: Keys that only the second dataset has.
        moved: How many of the samples only in the first the second has under another key.
        settings: Differences of family and tokenizer: name, and value of each.
    """

    samples: tuple[int, int]
    equal: int
    changed: tuple[ChangedSample, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    moved: int
    settings: tuple[tuple[str, str, str], ...]

    @property
    def is_equal(self) -> bool:
        """Whether they have the same samples, family and tokenizer."""
        return not (self.changed or self.only_first or self.only_second or self.settings)


def compare(first: VlmDataset, second: VlmDataset) -> DatasetComparison:
    """Compares two datasets by the keys and checksums of their indexes."""
    indexes = (first.index, second.index)
    keys = [index.keys.to_pylist() for index in indexes]
    at = {key: i for i, key in enumerate(keys[1])}
    pairs = [(i, at[key]) for i, key in enumerate(keys[0]) if key in at]
    ours, theirs = np.array(pairs, np.int64).reshape(-1, 2).T
    parts = [{part: digests(index, part) for part in PARTS} for index in indexes]
    differs = {part: parts[0][part][ours] != parts[1][part][theirs] for part in PARTS}
    anything = np.any(list(differs.values()), axis=0)
    changed = tuple(
        ChangedSample(keys[0][ours[n]], tuple(part for part in PARTS if differs[part][n]))
        for n in np.flatnonzero(anything).tolist()
    )
    known = set(keys[0])
    alone = [i for i, key in enumerate(keys[0]) if key not in at]
    others = [i for i, key in enumerate(keys[1]) if key not in known]
    contents = [combined(list(each.values())) for each in parts]
    shared = Counter(contents[0][alone].tolist()) & Counter(contents[1][others].tolist())
    return DatasetComparison(
        samples=(len(keys[0]), len(keys[1])),
        equal=len(pairs) - len(changed),
        changed=changed,
        only_first=tuple(keys[0][i] for i in alone),
        only_second=tuple(keys[1][i] for i in others),
        moved=shared.total(),
        settings=_settings(first, second),
    )


def _settings(first: VlmDataset, second: VlmDataset) -> tuple[tuple[str, str, str], ...]:
    facts = [
        {
            "family": each.family.name,
            **{f"tokenizer.{k}": v for k, v in flat(dataclasses.asdict(each.manifest.tokenizer)).items()},
        }
        for each in (first, second)
    ]
    names = sorted(set(facts[0]) | set(facts[1]))
    found = [(name, str(facts[0].get(name)), str(facts[1].get(name))) for name in names if name != "tokenizer.name"]
    return tuple(each for each in found if each[1] != each[2])
