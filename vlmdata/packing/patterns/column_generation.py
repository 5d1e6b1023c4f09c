"""Packing as cutting stock: which patterns, how often, and how few bins any packing needs.

A pattern is a set of sizes that fits a bin. The linear program over all patterns is solved by column generation
(Gilmore and Gomory, "A linear programming approach to the cutting-stock problem", Operations Research 9, 1961): given a
price per size, a knapsack finds the pattern worth most, and the program takes it up if it is worth more than a bin.
Prices are smoothed towards the best ones so far (Wentges, "Weighted Dantzig-Wolfe decomposition", 1997), and the
patterns of best-fit packings come first, so that few rounds are needed.

Floating point proposes, integers decide. Prices are rounded to integers, and the knapsack over them is exact. If no
filling is worth more than F, and the items together are worth V, then every packing has at least V / F bins, whatever
the prices: a lower bound that no rounding error can spoil.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from vlmdata.packing.arrays import FloatArray, IntArray

# Prices are integers in units of 2**-40 bins.
_UNIT = 1 << 40
_SMOOTHING = 0.5
_MAX_ROUNDS = 60
_PIVOTS_PER_SIZE = 120
# A filling is offered to the program if it is worth at least this share of the best one.
_OFFERED = 0.97
_TINY = 1e-9


@dataclass(frozen=True, eq=False, slots=True)
class FractionalPacking:
    """A nearly optimal solution of the linear program, and what it proves.

    Patterns are indices of sizes in increasing order, D where one is shorter; the most used is first.
    """

    patterns: IntArray  # int64 (P, slots)
    amounts: FloatArray  # float64 (P,), how often each is used: a proposal
    lower_bound: int  # no packing has fewer bins; exact
    prices: FloatArray  # float64 (D,), the prices that prove it, in bins; at least 0


def solve_patterns(
    sizes: IntArray, counts: IntArray, capacity: int, patterns: IntArray | None = None, gap: float = 0.0
) -> FractionalPacking:
    """Solves the linear program over all patterns, with the same result on every machine.

    Args:
        sizes: int64 (D,), distinct, strictly decreasing, in ``[1, capacity]``.
        counts: int64 (D,), items of each size, at least 1.
        capacity: Bin size.
        patterns: int64 (P, slots), to start with: indices of sizes, D where a pattern is shorter; ``slots =
            capacity // sizes[-1]``.
        gap: Stop when the solution is within this share of the bound, or when its bins rounded up equal it.
    """
    slots = int(capacity // sizes[-1])
    # As many as fit of one size.
    known = np.where(np.arange(slots) < (capacity // sizes)[:, None], np.arange(len(sizes))[:, None], len(sizes))
    if patterns is not None and len(patterns):
        known = np.concatenate([known, np.unique(np.sort(patterns, axis=1), axis=0)])
    least_gain = max(gap, 1e-7)
    program = CoveringProgram(counts, known, _PIVOTS_PER_SIZE * len(sizes), least_gain)
    share = Fraction(0)
    bound, centre = 0, sizes / capacity
    for _ in range(_MAX_ROUNDS):
        program.optimise()
        bins = program.bins
        # Smoothed prices first; the program's own if those find no pattern that helps.
        for weight in (_SMOOTHING, 0.0):
            prices = np.rint((weight * centre + (1 - weight) * program.prices) * _UNIT).astype(np.int64)
            prices = np.maximum(prices, 0)
            best = best_values(sizes, prices, capacity)
            needed = Fraction(_worth(prices, counts), int(best[-1]))
            if needed > share:
                share, bound, centre = needed, math.ceil(needed), prices / float(best[-1])
            if bins <= bound * (1 + gap):
                return FractionalPacking(*_used(program), bound, centre)
            starts = np.flatnonzero(prices + best[capacity - sizes] >= best[-1] * _OFFERED)
            found = fillings_with(starts, best, sizes, prices, slots)
            found = found[program.reduced_costs(found) < -least_gain]
            if len(found):
                program.add(np.unique(found, axis=0))
                break
        else:
            break
    return FractionalPacking(*_used(program), bound, centre)


def bound_of_prices(sizes: IntArray, counts: IntArray, capacity: int, prices: FloatArray) -> int:
    """Returns the lower bound on the bins that any prices prove, exact.

    It is what all items cost over what the most expensive filling of a bin costs, rounded up. Sizes and counts are
    int64 (D,), prices float64 (D,), at least 0, in bins.
    """
    exact = np.rint(prices * _UNIT).astype(np.int64)
    most = int(best_values(sizes, exact, capacity)[-1])
    return math.ceil(Fraction(_worth(exact, counts), most)) if most else 0


def worth_of_rooms(sizes: IntArray, prices: FloatArray, capacity: int) -> FloatArray:
    """Returns the highest price of items that fit each amount of room from 0 to capacity, float64 (capacity + 1,).

    Sizes are int64 (D,), in ``[1, capacity]``, prices float64 (D,), at least 0, in bins.
    """
    return best_values(sizes, np.rint(prices * _UNIT).astype(np.int64), capacity) / _UNIT


def _worth(prices: IntArray, counts: IntArray) -> int:
    """Prices all items together, in Python's integers, which do not overflow."""
    return sum(price * count for price, count in zip(prices.tolist(), counts.tolist(), strict=True))


def _used(program: CoveringProgram) -> tuple[IntArray, FloatArray]:
    """Returns the patterns in the solution and how often each is used, most often first."""
    some = np.flatnonzero((program.basis >= 0) & (program.amounts > 0))
    some = some[np.argsort(-program.amounts[some], kind="stable")]
    return program.patterns[program.basis[some]], program.amounts[some]


def best_values(sizes: IntArray, values: IntArray, capacity: int) -> IntArray:
    """Returns the value of the best filling of every room: the unbounded knapsack by dynamic programming.

    Sizes are int64 (D,), each in ``[1, capacity]``, values int64 (D,), at least 0. The result is int64 (capacity + 1,),
    non-decreasing.
    """
    best = np.zeros(capacity + 1, np.int64)
    for size, value in zip(sizes.tolist(), values.tolist(), strict=True):
        if not value:
            continue
        # In blocks of the size, so that a block may build on the one before: any number of copies.
        for start in range(size, capacity + 1, size):
            stop = min(start + size, capacity + 1)
            block = best[start:stop]
            np.maximum(block, best[start - size : stop - size] + value, out=block)
    return best


def fillings_with(starts: IntArray, best: IntArray, sizes: IntArray, values: IntArray, slots: int) -> IntArray:
    """Returns, for each of some sizes, int64 (n,) indices, a best filling among those that contain it.

    ``best`` is from :func:`best_values`, ``slots`` at least the most items that fit a bin. The result is int64 (n,
    slots), indices of sizes in increasing order; D where a filling is shorter.
    """
    filling = np.full((len(starts), slots), len(sizes), np.int64)
    filling[:, 0] = starts
    room = len(best) - 1 - sizes[starts]
    live = np.arange(len(starts))
    for slot in range(1, slots):
        live = live[best[room[live]] > 0]
        if not len(live):
            break
        rest = room[live][:, None] - sizes
        reached = np.where(rest >= 0, best[np.maximum(rest, 0)] + values, -1)
        chosen = ((reached == best[room[live]][:, None]) & (values > 0)).argmax(axis=1)
        filling[live, slot] = chosen
        room[live] -= sizes[chosen]
    filling.sort(axis=1)
    return filling


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
