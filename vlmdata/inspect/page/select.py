"""Which samples a page shows: extremes and what is suspicious first, then some by chance; or those asked for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vlmdata.inspect.dataset import DatasetCard
from vlmdata.inspect.findings import Severity

_FINDINGS_FIRST = 3


def choose_samples(card: DatasetCard, total: int, count: int, seed: int) -> dict[int, str]:
    """Position -> why, of at most ``count`` samples of ``total``.

    Args:
        card: The dataset's card.
        total: Samples of the dataset.
        count: Most samples.
        seed: Of the random ones.
    """
    reasons: dict[int, list[str]] = {}
    for group in card.findings:
        shown = group.examples if group.severity is not Severity.NOTE else group.examples[:_FINDINGS_FIRST]
        for example in shown:
            reasons.setdefault(example.index, []).append(group.kind.replace("_", " "))
    for extremes in card.extremes:
        for sample in extremes.samples:
            reasons.setdefault(sample.index, []).append(extremes.title)
    chosen = {index: ", ".join(dict.fromkeys(why)) for index, why in list(reasons.items())[:count]}
    # Twice as many as are wanted: at most half of them were chosen already.
    for index in np.random.default_rng(seed).permutation(total)[: 2 * count].tolist():
        if len(chosen) >= min(count, total):
            break
        chosen.setdefault(index, "random")
    return chosen


def given_samples(positions: Sequence[int]) -> dict[int, str]:
    """The same for samples that were asked for."""
    return dict.fromkeys(positions, "asked for")
