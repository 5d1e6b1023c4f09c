"""Histograms for people: round-numbered bins, few of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BINS = 10
PERCENTILES = (0, 5, 25, 50, 75, 95, 99, 100)


@dataclass(frozen=True)
class Histogram:
    """How a quantity is spread over samples or images.

    Attributes:
        name: Short name.
        title: What is counted, with its unit.
        kind: "integer", "share" (of 1) or "ratio": how values are to be written.
        count: Values.
        mean: Mean.
        percentiles: (percent, value) pairs; a value is one that occurs.
        edges: Bin edges, one more than ``counts``; a bin holds its lower edge, the last one both.
        counts: Values per bin.
    """

    name: str
    title: str
    kind: str
    count: int
    mean: float
    percentiles: tuple[tuple[int, float], ...]
    edges: tuple[float, ...]
    counts: tuple[int, ...]


def histogram(name: str, title: str, kind: str, values: npt.NDArray[np.number]) -> Histogram | None:
    """The histogram of some values; None of none.

    Args:
        name: Short name.
        title: What is counted.
        kind: "integer", "share" or "ratio".
        values: (n,) finite numbers.
    """
    if not len(values):
        return None
    edges = _integer_edges(values) if kind == "integer" else _even_edges(values)
    counts, _ = np.histogram(values, edges)
    marks = np.percentile(values, PERCENTILES, method="inverted_cdf")
    number = int if kind == "integer" else float
    return Histogram(
        name=name,
        title=title,
        kind=kind,
        count=len(values),
        mean=float(values.mean(dtype=np.float64)),
        percentiles=tuple((p, number(v)) for p, v in zip(PERCENTILES, marks.tolist(), strict=True)),
        edges=tuple(map(number, edges.tolist())),
        counts=tuple(counts.tolist()),
    )


def _integer_edges(values: npt.NDArray[np.number]) -> npt.NDArray[np.int64]:
    """Edges of bins [low, high): whole numbers, each value in a bin of its own if there are few."""
    low, high = int(values.min()), int(values.max())
    step = _round_step(high + 1 - low)
    start = low // step * step
    return np.arange(start, (high // step + 2) * step, step)


def _even_edges(values: npt.NDArray[np.number]) -> npt.NDArray[np.float64]:
    low, high = float(values.min()), float(values.max())
    if low == high:
        return np.array([low, high + max(abs(high), 1.0) * 1e-3])
    magnitude = 10.0 ** np.floor(np.log10((high - low) / BINS))
    step = next(m * magnitude for m in (1, 2, 5, 10, 20) if (high - low) / (m * magnitude) <= BINS)
    first, last = int(np.floor(low / step)), int(np.floor(high / step)) + 1
    # From whole numbers, so that the edges are the decimals one reads.
    edges: npt.NDArray[np.float64] = np.round(np.arange(first, last + 1) * step, 12)
    return edges


def _round_step(span: int) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50, … that cuts a span into at most :data:`BINS` bins."""
    step = 1
    while True:
        for factor in (1, 2, 5):
            if span <= factor * step * BINS:
                return factor * step
        step *= 10
