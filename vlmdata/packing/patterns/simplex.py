"""The linear program behind cutting stock: how often to use each pattern so that every item is covered.

A primal simplex with a dense inverse. Its float64 arithmetic is elementwise only (products, differences, quotients,
each rounded once, as IEEE 754 prescribes): no dot product, no BLAS, no sum whose order a library chooses. So it takes
the same pivots, and gives the same numbers, on every machine.
"""

from __future__ import annotations

import math

import numpy as np

from vlmdata.packing.arrays import FloatArray, IntArray

_TINY = 1e-9


class CoveringProgram:
    """Minimise the number of patterns, as a real number, that cover the demand for every size.

    Dantzig, "Linear Programming and Extensions" (1963): the revised simplex with an explicit inverse. Covering more
    than the demand is allowed, so surplus columns take part and prices do not stay negative.

    Attributes:
        patterns: int64 (P, slots), the columns known so far: indices of sizes, D where a pattern is shorter.
        amounts: float64 (D,), how often each basic column is used.
        basis: int64 (D,), basic columns: row of ``patterns``, or -1 for a surplus.
        prices: float64 (D,), the dual solution: what an item of each size costs, in bins.
        pivots: Pivots so far.
    """

    def __init__(self, counts: IntArray, patterns: IntArray, max_pivots: int, least_gain: float) -> None:
        """Starts from patterns that hold one size each, int64 (P, slots): row i < D holds size i only.

        The demand is int64 (D,), at least 1. Stops after ``max_pivots``, optimal or not. Columns that save less than
        ``least_gain`` of a bin stay out.
        """
        self._size = len(counts)
        copies = (patterns[: self._size] < self._size).sum(axis=1).astype(np.float64)
        self.patterns = patterns
        self.amounts = counts / copies
        self.basis = np.arange(self._size)
        self.prices = 1 / copies
        self.pivots = 0
        self._cost = np.ones(self._size)
        # Transposed inverse: row i is the column of size i, so that a pattern's column is a sum of a few rows.
        self._inverse = np.zeros((self._size, self._size))
        np.fill_diagonal(self._inverse, 1 / copies)
        self._max_pivots = max_pivots
        self._least_gain = least_gain
        self._product = np.empty((self._size, self._size))

    @property
    def bins(self) -> float:
        """Returns the objective, rounded once."""
        return math.fsum((self.amounts * self._cost).tolist())

    def add(self, patterns: IntArray) -> None:
        """Adds columns, int64 (n, slots)."""
        self.patterns = np.concatenate([self.patterns, patterns])

    def reduced_costs(self, patterns: IntArray) -> FloatArray:
        """Returns one bin minus the prices of a pattern's items, float64 (n,): negative if it saves bins."""
        return self._reduced_costs(np.ascontiguousarray(patterns.T))

    def optimise(self) -> None:
        """Pivots until no known column saves anything."""
        while self.pivots < self._max_pivots:
            at = self.pivots
            candidates = np.flatnonzero(self.reduced_costs(self.patterns) < -self._least_gain)
            self._optimise_among(candidates)
            if self.pivots == at:
                return

    def _reduced_costs(self, by_slot: IntArray) -> FloatArray:
        prices = np.append(self.prices, 0.0)
        reduced = np.ones(by_slot.shape[1])
        for items in by_slot:
            reduced -= prices[items]
        return reduced

    def _optimise_among(self, candidates: IntArray) -> None:
        by_slot = np.ascontiguousarray(self.patterns[candidates].T)
        while self.pivots < self._max_pivots:
            reduced = self._reduced_costs(by_slot)
            best = int(reduced.argmin()) if len(reduced) else -1
            gain = float(reduced[best]) if len(reduced) else 0.0
            surplus = int(self.prices.argmin())
            if min(gain, self.prices[surplus]) > -self._least_gain:
                return
            if self.prices[surplus] < gain:
                self._pivot(-self._inverse[surplus], float(self.prices[surplus]), -1)
            else:
                column = np.zeros(self._size)
                for item in by_slot[:, best].tolist():
                    if item < self._size:
                        column += self._inverse[item]
                self._pivot(column, gain, int(candidates[best]))

    def _pivot(self, column: FloatArray, gain: float, entering: int) -> None:
        usable = column > _TINY
        ratio = np.where(usable, self.amounts / np.where(usable, column, 1.0), np.inf)
        leaving = int(ratio.argmin())
        step = ratio[leaving]
        self.amounts = np.maximum(self.amounts - step * column, 0.0)
        self.amounts[leaving] = step
        row = self._inverse[:, leaving] / column[leaving]
        column[leaving] -= 1.0  # so that the update below leaves `row` in the leaving place
        np.multiply(row[:, None], column, out=self._product)
        self._inverse -= self._product
        self.prices = self.prices + gain * row
        self.basis[leaving] = entering
        self._cost[leaving] = 0.0 if entering < 0 else 1.0
        self.pivots += 1
