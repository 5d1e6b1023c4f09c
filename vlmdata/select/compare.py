"""What differs between two datasets: samples only in one, and samples with the same key and other content.

Only the indexes are read. Content is what is trained on, as decoded: tokens, targets, weights, positions, pixels. So a
dataset and its copy in another codec are equal.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vlmdata.errors import UsageError
from vlmdata.format.dataset import VlmDataset
from vlmdata.format.index import DatasetIndex
from vlmdata.format.row_places import RowPlaces
from vlmdata.format.schema import parse_key
from vlmdata.format.source_columns import column_name, source_names
from vlmdata.format.tokenizer_info import flat
from vlmdata.select.content import PARTS, combined, content, digests

#: Pairs samples by the ids of their rows.
ID = "id"


@dataclass(frozen=True)
class ChangedSample:
    """A sample with the same key in both datasets, and other content."""

    key: str
    parts: tuple[str, ...]  # what differs: names of ``content.PARTS``
    second_key: str | None = None  # in the second dataset, if samples are paired by an id
    id: str | None = None  # that of the row


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


def compare(first: VlmDataset, second: VlmDataset, match: str | None = None) -> DatasetComparison:
    """Compares two datasets by the checksums of their indexes.

    Args:
        first: A dataset.
        second: Another one.
        match: What pairs their samples: None for keys; ``id`` for the ids of their rows, or the name of a kept column
            of the source. Of equal ids, the first is paired with the first; rows without one are paired by content.

    Raises:
        UsageError: If a dataset has no such ids.
    """
    indexes = (first.index, second.index)
    keys = [index.keys.to_pylist() for index in indexes]
    ids = [None if match is None else ids_of(each, match) for each in (first, second)]
    names = [key if its is None else _names(its, each) for key, its, each in zip(keys, ids, indexes, strict=True)]
    at = {name: i for i, name in enumerate(names[1])}
    pairs = [(i, at[name]) for i, name in enumerate(names[0]) if name in at]
    ours, theirs = np.array(pairs, np.int64).reshape(-1, 2).T
    parts = [{part: digests(index, part) for part in PARTS} for index in indexes]
    differs = {part: parts[0][part][ours] != parts[1][part][theirs] for part in PARTS}
    anything = np.any(list(differs.values()), axis=0)
    changed = tuple(
        ChangedSample(
            keys[0][ours[n]],
            tuple(part for part in PARTS if differs[part][n]),
            *(() if ids[0] is None else (keys[1][theirs[n]], ids[0][ours[n]])),
        )
        for n in np.flatnonzero(anything).tolist()
    )
    known = set(names[0])
    alone = [i for i, name in enumerate(names[0]) if name not in at]
    others = [i for i, name in enumerate(names[1]) if name not in known]
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


def ids_of(dataset: VlmDataset, name: str) -> list[str | None]:
    """Returns the ids of the rows of samples: values of a kept column of the source, or for ``id`` those of the rows.

    Raises:
        UsageError: If the dataset has none.
    """
    table = dataset.index.table
    if column_name(name) in table.column_names:
        return [None if value is None else str(value) for value in table[column_name(name)].to_pylist()]
    found = RowPlaces.read(dataset.directory, dataset.manifest).ids(dataset.index.source_row.tolist())
    if name != ID or not any(each is not None for each in found):
        kept = ", ".join(source_names(table.schema)) or "none"
        raise UsageError(
            f"--match {name}: {dataset.name} has no ids of this name. Kept columns: {kept}. Ids of rows (--match id) "
            "are recorded by `vlmdata preprocess` of this version, in the column of --id or one named id, uid, uuid, "
            "guid, _id or key; datasets of select and join have those of kept columns."
        )
    return found


def _names(ids: Sequence[str | None], index: DatasetIndex) -> list[Any]:
    """Returns what pairs samples: id and place in the list of the row, or content; and the number among equals."""
    samples = [(parse_key(key) or (0, -1))[1] for key in index.keys.to_pylist()]
    contents = content(index).tolist()
    times = Counter[Any]()
    found = []
    for id, sample, its in zip(ids, samples, contents, strict=True):
        name = (None, its) if id is None else (id, sample)
        found.append((name, times[name]))
        times[name] += 1
    return found


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
