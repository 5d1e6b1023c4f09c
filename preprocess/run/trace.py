"""``--trace ROW``: processes one row with source, recipe and encoder, writes nothing and keeps all errors."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vlmdata.errors import SourceError
from vlmdata.preprocess.encode import EncodedSample, Encoder
from vlmdata.preprocess.encode.shorten import encode_shortened
from vlmdata.preprocess.encode.variants import with_variants
from vlmdata.preprocess.recipes.base import Candidate, Recipe, candidates_of
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.row import Row
from vlmdata.preprocess.sources.rows import Source
from vlmdata.wording import counted


@dataclass(frozen=True, eq=False)
class TracedCandidate:
    """Outcome of a candidate: its samples, its rejection or an unexpected error."""

    candidate: Candidate
    outcome: list[EncodedSample | RowRejected] | Exception

    @property
    def accepted(self) -> bool:
        """True if all of it became samples."""
        return isinstance(self.outcome, list) and all(isinstance(each, EncodedSample) for each in self.outcome)


@dataclass(frozen=True, eq=False)
class TracedRow:
    """Outcome of a row of a source with ``rows`` rows."""

    number: int
    rows: int
    row: Row | None  # None if the source could not read it
    candidates: tuple[TracedCandidate, ...] = ()  # none if there is an error
    error: Exception | None = None  # the rejection of the whole row, or an unexpected error

    @property
    def accepted(self) -> bool:
        """True if every result of the recipe became a sample."""
        return self.error is None and all(candidate.accepted for candidate in self.candidates)


def trace_row(source: Source, recipe: Recipe, encoder: Encoder, number: int) -> TracedRow:
    """Processes one row as a run would.

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
        candidates = with_variants(candidates_of(recipe, row, encoder.config.keep_columns), row, encoder.config)
    except Exception as error:
        return TracedRow(number, rows, row, error=error)
    return TracedRow(number, rows, row, tuple(_traced(candidate, encoder) for candidate in candidates))


def _traced(candidate: Candidate, encoder: Encoder) -> TracedCandidate:
    if isinstance(candidate.made, RowRejected):
        return TracedCandidate(candidate, candidate.made)
    try:
        made, outcomes = encode_shortened(candidate.made, encoder)
        return TracedCandidate(replace(candidate, made=made) if made.shortened else candidate, list(outcomes))
    except Exception as error:
        return TracedCandidate(candidate, error)
