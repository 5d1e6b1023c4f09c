"""Readable histograms: few bins with round edges, logarithmic if an outlier would dominate a linear axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

BINS = 10
PERCENTILES = (0, 5, 25, 50, 75, 95, 99, 100)
#: Bins of equal width are not useful if this share of values is in one bin and the largest value is this many
#: times the median.
_CROWDED, _FAR = 0.8, 10.0
#: Edges per factor of ten, from fine to coarse. The first choice with at most this many bins is used.
_LOG_STEPS, _LOG_BINS = ((1, 2, 5), (1, 3), (1,)), 12


@dataclass(frozen=True)
class Histogram:
    """Distribution of a quantity over samples or images."""

    name: str
    title: str  # counted quantity with its unit
    kind: str  # format of values: "integer", "share" (of 1) or "ratio"
    scale: Literal["linear", "log"]  # of bins: equal widths, or widths that grow with the values
    count: int
    mean: float
    percentiles: tuple[tuple[int, float], ...]  # (percent, value) pairs; each value occurs in the data
    edges: tuple[float, ...]  # of bins, one more than counts; a bin includes its lower edge, the last bin both
    counts: tuple[int, ...]


def histogram(name: str, title: str, kind: str, values: npt.NDArray[np.number]) -> Histogram | None:
    """Computes a histogram of finite numbers (n,); None without values."""
    if not len(values):
        return None
    edges = _integer_edges(values) if kind == "integer" else _even_edges(values)
    counts, _ = np.histogram(values, edges)
    scale: Literal["linear", "log"] = "linear"
    if kind != "share" and _crowded(values, counts):
        edges, scale = _log_edges(values), "log"
        counts, _ = np.histogram(values, edges)
    marks = np.percentile(values, PERCENTILES, method="inverted_cdf")
    number = int if kind == "integer" else float
    return Histogram(
        name=name,
        title=title,
        kind=kind,
        scale=scale,
        count=len(values),
        mean=float(values.mean(dtype=np.float64)),
        percentiles=tuple((p, number(v)) for p, v in zip(PERCENTILES, marks.tolist(), strict=True)),
        edges=tuple(map(number, edges.tolist())),
        counts=tuple(counts.tolist()),
    )


def _integer_edges(values: npt.NDArray[np.number]) -> npt.NDArray[np.int64]:
    """Returns integer edges of bins [low, high), with one bin per value if there are few."""
    low, high = int(values.min()), int(values.max())
    step = max(int(_round_step(high + 1 - low)), 1)
    start = low // step * step
    return np.arange(start, (high // step + 2) * step, step)


def _even_edges(values: npt.NDArray[np.number]) -> npt.NDArray[np.float64]:
    low, high = float(values.min()), float(values.max())
    if high - low <= 1e-9 * max(abs(high), 1.0):  # below the resolution of rounded edges
        return np.array([low, high + max(abs(high), 1.0) * 1e-3])
    step = _round_step(high - low)
    first, last = int(np.floor(low / step)), int(np.floor(high / step)) + 1
    # Computed from integers, so that edges are exact decimals.
    edges: npt.NDArray[np.float64] = np.round(np.arange(first, last + 1) * step, 12)
    return edges


def _crowded(values: npt.NDArray[np.number], counts: npt.NDArray[np.int64]) -> bool:
    """True if a far outlier puts nearly all values into one bin of equal width."""
    median = max(float(np.median(values)), 1.0)
    low, high = float(values.min()), float(values.max())
    return bool(low >= 0 and high >= _FAR * median and counts.max() >= _CROWDED * len(values))


def _log_edges(values: npt.NDArray[np.number]) -> npt.NDArray[np.float64]:
    """Returns edges 1, 2, 5, 10, 20, … (or fewer per factor of ten) around values >= 0; 0 is an edge if it occurs."""
    positive = values[values > 0]
    low, high = float(positive.min()), float(values.max())
    decades = range(int(np.floor(np.log10(low))) - 1, int(np.floor(np.log10(high))) + 2)
    for steps in _LOG_STEPS:
        # Computed from decimals, so that 0.2 is printed as 0.2.
        marks = np.array([float(f"{step}e{decade}") for decade in decades for step in steps])
        first = int(np.searchsorted(marks, low, side="right")) - 1
        last = int(np.searchsorted(marks, high, side="right"))
        edges = marks[first : last + 1]
        if len(edges) - 1 <= _LOG_BINS - 1:
            break
    return np.concatenate([[0.0], edges]) if (values == 0).any() else edges


def _round_step(span: float) -> float:
    """Returns the smallest of …, 0.5, 1, 2, 5, 10, … that divides a span into at most :data:`BINS` bins."""
    magnitude = float(10.0 ** np.floor(np.log10(span / BINS)))
    return next(m * magnitude for m in (1, 2, 5, 10, 20) if span / (m * magnitude) <= BINS)
