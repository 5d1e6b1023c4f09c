"""The covering program alone, on patterns that are not closed under leaving items out, so that surplus counts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmdata.packing.patterns.column_generation import CoveringProgram


def optimum(counts: np.ndarray, columns: np.ndarray) -> float:
    """Of ``min sum(x)`` with ``columns x >= counts``, by its dual: the best vertex of all."""
    size, number = columns.shape
    rows = np.concatenate([columns.T, np.eye(size)])
    sides = np.concatenate([np.ones(number), np.zeros(size)])
    best = 0.0
    for chosen in itertools.combinations(range(len(rows)), size):
        some = rows[list(chosen)]
        if abs(np.linalg.det(some)) < 1e-9:
            continue
        prices = np.linalg.solve(some, sides[list(chosen)])
        if prices.min() > -1e-9 and (columns.T @ prices).max() < 1 + 1e-9:
            best = max(best, float(counts @ prices))
    return best


def solved(counts: np.ndarray, patterns: np.ndarray) -> CoveringProgram:
    program = CoveringProgram(counts, patterns, 200, 1e-7)
    program.optimise()
    return program


def test_surplus_is_free() -> None:
    program = solved(np.array([1, 10]), np.array([[0, 2, 2], [1, 2, 2], [0, 1, 1]]))
    assert program.bins == 5
    assert sorted(program.basis.tolist()) == [-1, 2]
    assert program.prices.tolist() == [0, 0.5]


@settings(max_examples=80)
@given(
    counts=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    drawn=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=4),
)
def test_the_optimum_is_the_duals(counts: list[int], drawn: list[list[int]]) -> None:
    size, slots = len(counts), 4
    singles = [[number] * (1 + number % 2) for number in range(size)]
    rows = [sorted(min(item, size) for item in row) for row in singles + drawn]
    patterns = np.array([row + [size] * (slots - len(row)) for row in rows])
    columns = np.array([[row.count(number) for row in patterns.tolist()] for number in range(size)], float)
    program = solved(np.array(counts), patterns)
    assert program.bins == pytest.approx(optimum(np.array(counts), columns), abs=1e-5)
    assert (columns.T @ program.prices).max() <= 1 + 1e-6
    assert program.prices.min() >= -1e-6
    covered = np.zeros(size)
    for column, amount in zip(program.basis.tolist(), program.amounts.tolist(), strict=True):
        covered += columns[:, column] * amount if column >= 0 else 0
    assert (covered >= np.array(counts) - 1e-6).all()
