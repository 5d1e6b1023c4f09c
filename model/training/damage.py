"""Samples that the loaders of a step masked (``data.on_damage``): alike on ranks that share packs, known to all."""

from __future__ import annotations

import logging
from collections.abc import Collection

from model.training.agreement import gathered, together
from model.training.data import RankPlace
from vlmdata import StreamingLoader
from vlmdata.errors import DatasetFormatError

type SampleId = tuple[int, int]


def settle_damage(loader: StreamingLoader, place: RankPlace, masked: Collection[SampleId]) -> None:
    """Tells all loaders what any of them masked, so that their states and limits are one; a collective.

    Args:
        loader: The loader of this rank.
        place: This process.
        masked: (dataset number, position in the dataset) of the samples that this rank masked in the step.

    Raises:
        DatasetFormatError: On all ranks, if ranks that share packs masked different samples, as copies of the data on
            several nodes may differ; or if there are more than ``data.max_damaged`` now.
    """
    found = gathered((place.dp_rank, frozenset(masked)))
    with together():
        by_packs: dict[int, tuple[int, frozenset[SampleId]]] = {}
        for rank, (packs, samples) in enumerate(found):
            first, expected = by_packs.setdefault(packs, (rank, samples))
            if samples != expected:
                names = [str(each) for each in loader.describe_damaged(samples ^ expected)]
                raise DatasetFormatError(
                    f"ranks {first} and {rank} read the same packs, but only one of them finds damage: "
                    f"{'; '.join(names)}. Their copies of the data differ: run `vlmdata verify` on each node"
                )
        loader.add_damaged(frozenset[SampleId]().union(*(samples for _, samples in found)))


def name_damage_once(place: RankPlace) -> None:
    """Leaves the log of damaged samples to one of the ranks that share packs."""
    if not place.speaks or place.cp_rank:
        logging.getLogger("vlmdata.loader.damage").setLevel(logging.ERROR)
