"""Chooses the samples of a page: extremes and suspicious ones first, then random ones."""

from __future__ import annotations

import numpy as np

from vlmdata.inspect.dataset import DatasetCard
from vlmdata.inspect.findings import Severity

_FINDINGS_FIRST = 3


def choose_samples(card: DatasetCard, total: int, count: int, seed: int) -> dict[int, str]:
    """Returns the positions of at most ``count`` samples of ``total``, with the reason for each."""
    reasons: dict[int, list[str]] = {}
    for group in card.findings:
        shown = group.examples if group.severity is not Severity.NOTE else group.examples[:_FINDINGS_FIRST]
        for example in shown:
            reasons.setdefault(example.index, []).append(group.kind.replace("_", " "))
    for extremes in card.extremes:
        for sample in extremes.samples:
            reasons.setdefault(sample.index, []).append(extremes.title)
    chosen = {index: ", ".join(dict.fromkeys(why)) for index, why in list(reasons.items())[:count]}
    # Draw twice as many as needed: at most half of them are already chosen.
    for index in np.random.default_rng(seed).permutation(total)[: 2 * count].tolist():
        if len(chosen) >= min(count, total):
            break
        chosen.setdefault(index, "random")
    return chosen
