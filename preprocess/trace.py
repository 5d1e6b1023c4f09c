"""``--trace ROW``: one row through source, recipe and encoder, with nothing written and every error kept."""

from __future__ import annotations

from dataclasses import dataclass

from preprocess.candidates import Candidate, candidates_of
from preprocess.encode import EncodedSample, Encoder
from preprocess.recipes.base import Recipe, Row
from preprocess.reject import RowRejected
from preprocess.sources.rows import Source
from vlmdata.errors import SourceError
from vlmdata.wording import counted


@dataclass(frozen=True, eq=False)
class TracedCandidate:
    """What became of a candidate.

    Attributes:
        candidate: What the recipe made.
        outcome: The sample, or those of a document that was split; or the rejection, or the error that nobody
            foresaw.
    """

    candidate: Candidate
    outcome: list[EncodedSample | RowRejected] | Exception

    @property
    def accepted(self) -> bool:
        """Whether all of it became samples."""
        return isinstance(self.outcome, list) and all(isinstance(each, EncodedSample) for each in self.outcome)


@dataclass(frozen=True, eq=False)
class TracedRow:
    """What became of a row.

    Attributes:
        number: The row.
        rows: Rows of the source.
        row: The row as the recipe got it; None if the source could not read it.
        candidates: What the recipe made of it, and what became of that; empty if ``error`` is set.
        error: The rejection of the whole row, or the error that nobody foresaw.
    """

    number: int
    rows: int
    row: Row | None
    candidates: tuple[TracedCandidate, ...] = ()
    error: Exception | None = None

    @property
    def accepted(self) -> bool:
        """Whether everything that the recipe made became a sample."""
        return self.error is None and all(candidate.accepted for candidate in self.candidates)


def trace_row(source: Source, recipe: Recipe, encoder: Encoder, number: int) -> TracedRow:
    """Takes one row the way a run would.

    Raises:
        SourceError: If the source has no such row.
    """
    rows = source.num_rows
    if not 0 <= number < rows:
        raise SourceError(f"--trace {number}: the source has {counted(rows, 'row')}, numbered from 0")
    try:
        row = source.row(number)
    except RowRejected as error:
        return TracedRow(number, rows, None, error=error)
    try:
        candidates = candidates_of(recipe, row)
    except Exception as error:
        return TracedRow(number, rows, row, error=error)
    return TracedRow(number, rows, row, tuple(_traced(candidate, encoder) for candidate in candidates))


def _traced(candidate: Candidate, encoder: Encoder) -> TracedCandidate:
    if isinstance(candidate.made, RowRejected):
        return TracedCandidate(candidate, candidate.made)
    try:
        return TracedCandidate(candidate, encoder.encode_all(candidate.made))
    except Exception as error:
        return TracedCandidate(candidate, error)
