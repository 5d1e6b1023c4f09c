"""Near duplicates that ``vlmdata select`` reported, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlmdata.format.dataset import VlmDataset
from vlmdata.inspect.sample import position_of
from vlmdata.inspect.tokens import TokenTexts


@dataclass(frozen=True)
class Side:
    """One sample of a pair."""

    key: str
    length: int  # tokens
    images: int
    text: str  # its text, without special tokens


@dataclass(frozen=True)
class Pair:
    """A near duplicate, and the sample that stays for it."""

    kind: str  # ``near-texts`` or ``near-images``
    likeness: float  # from 0 to 1
    kept: Side
    dropped: Side


def duplicate_pairs(dataset: VlmDataset, report: Sequence[Mapping[str, Any]]) -> list[Pair]:
    """Returns the pairs of a report, in its order.

    Raises:
        NotFoundError: If the dataset does not have one of the samples.
    """
    texts = TokenTexts(dataset.directory, dataset.manifest)

    def side(key: str) -> Side:
        i = dataset.index.position_of(key)
        sample, images = dataset.without_pixels(i), int(dataset.index.item_counts[i])
        ids = [each for each in sample.input_ids[: sample.length].tolist() if not texts.is_special(each)]
        return Side(key, sample.length, images, texts.decode(ids))

    return [Pair(each["kind"], float(each["likeness"]), side(each["kept"]), side(each["key"])) for each in report]


def grouped(dataset: VlmDataset, report: Sequence[Mapping[str, Any]], count: int) -> dict[int, str]:
    """Returns the positions of at most ``count`` samples of groups, each group in a row, with what each is."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for each in report:
        groups.setdefault(each["kept"], []).append(each)
    chosen: dict[int, str] = {}
    for kept, dropped in groups.items():
        if chosen and len(chosen) + 1 + len(dropped) > count:
            break
        chosen[position_of(dataset, kept)] = f"stays for {len(dropped):,}"
        for each in dropped:
            chosen[position_of(dataset, each["key"])] = f"{each['kind']} of {kept}: {100 * each['likeness']:.1f} %"
    return chosen
