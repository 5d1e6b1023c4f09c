"""Samples that the loaders of a step masked (``data.on_damage``): alike on ranks that share packs, known to all."""

from __future__ import annotations

import logging
from collections.abc import Collection

from vlmdata import StreamingLoader
from vlmdata.errors import DatasetFormatError
from vlmdata.model.training.data import RankPlace
from vlmdata.model.training.processes.agreement import gathered, together

type SampleId = tuple[int, int]

#: Data-parallel rank of ranks of a vision tower of its own.
_TOWER = -1


def settle_damage(loader: StreamingLoader, place: RankPlace, masked: Collection[SampleId]) -> None:
    """Tells all loaders what any of them masked in a step, so that their states and limits are one; a collective.

    ``masked`` are dataset numbers and positions in the dataset. All ranks raise a DatasetFormatError if ranks that
    share packs masked different samples, as copies of the data on several nodes may differ; or if there are more than
    ``data.max_damaged`` now. A rank of a vision tower of its own shares the packs of all.
    """
    found = gathered((place.dp_rank, frozenset(masked)))
    with together():
        by_packs: dict[int, tuple[int, frozenset[SampleId]]] = {}
        for rank, (packs, samples) in enumerate(found):
            first, expected = by_packs.setdefault(packs, (rank, samples))
            _require_same(loader, (first, rank), samples, expected)
        if (tower := by_packs.pop(_TOWER, None)) is not None:
            of_all = frozenset[SampleId]().union(*(samples for _, samples in by_packs.values()))
            _require_same(loader, (tower[0], min(rank for rank, _ in by_packs.values())), tower[1], of_all)
        loader.add_damaged(frozenset[SampleId]().union(*(samples for _, samples in found)))


def _require_same(
    loader: StreamingLoader, ranks: tuple[int, int], samples: frozenset[SampleId], expected: frozenset[SampleId]
) -> None:
    if samples == expected:
        return
    names = [str(each) for each in loader.describe_damaged(samples ^ expected)]
    raise DatasetFormatError(
        f"ranks {ranks[0]} and {ranks[1]} read the same packs, but only one of them finds damage: {'; '.join(names)}. "
        "Their copies of the data differ: run `vlmdata verify` on each node"
    )


def name_damage_once(place: RankPlace) -> None:
    """Leaves the log of damaged samples to one of the ranks that share packs."""
    if not place.speaks or place.cp_rank:
        logging.getLogger("vlmdata.loader.damage").setLevel(logging.ERROR)
