"""``--trace ROW``: processes one row with source, recipe and encoder, writes nothing and keeps all errors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pyarrow.compute as pc

from vlmdata.errors import SourceError
from vlmdata.format.ledger import place_text
from vlmdata.preprocess.encode import EncodedSample, Encoder
from vlmdata.preprocess.encode.shorten import encode_shortened
from vlmdata.preprocess.encode.variants import with_variants
from vlmdata.preprocess.recipes.base import Candidate, Recipe, candidates_of
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.row import Row
from vlmdata.preprocess.run.row_table import read_row_table
from vlmdata.preprocess.run.versions import Newest
from vlmdata.preprocess.sources.row_digests import row_digest
from vlmdata.preprocess.sources.rows import Source, id_of
from vlmdata.storage import Store
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
    place: str  # of the row in the source, in words; empty if unknown
    row: Row | None  # None if the source could not read it
    candidates: tuple[TracedCandidate, ...] = ()  # none if there is an error
    error: Exception | None = None  # the rejection of the whole row, or an unexpected error

    @property
    def accepted(self) -> bool:
        """True if every result of the recipe became a sample."""
        return self.error is None and all(candidate.accepted for candidate in self.candidates)


def number_in_source(store: Store, source: Source, row: int) -> int:
    """Returns the number in the source of a row of a finished dataset, whose later versions number rows otherwise.

    Args:
        store: The dataset, or where one would be made.
        source: The source as it is now.
        row: The number in keys, index and ledger.

    Raises:
        SourceError: If the newest version has no such row, or the row is not where that version found it.
    """
    newest = Newest.read(store)
    if newest is None or not newest.manifest.version:
        return row
    rows = read_row_table(newest.store, newest.manifest)
    at = pc.index(rows["row"], row).as_py()
    if at < 0:
        raise SourceError(f"--trace {row}: version {newest.number} of {store} has no row {row}")
    number, content = int(rows["source_row"][at].as_py()), rows["content"][at].as_py()
    moved = number >= len(source.rows)
    if not moved and content is not None:
        try:
            moved = row_digest(source.row(number)) != content
        except RowRejected as error:
            moved = row_digest(error) != content
    if moved:
        raise SourceError(
            f"--trace {row}: the source has changed since version {newest.number} of {store}, where this was row "
            f"{number} of the source. Run the command without --trace first, or leave out --out to count rows of the "
            "source."
        )
    return number


def trace_row(source: Source, recipe: Recipe, encoder: Encoder, number: int) -> TracedRow:
    """Processes one row as a run would.

    Raises:
        SourceError: If the source has no such row.
    """
    rows = source.num_rows
    if not 0 <= number < rows:
        raise SourceError(f"--trace {number}: the source has {counted(rows, 'row')}, numbered from 0")
    place = source.place(number)
    try:
        row = source.row(number)
    except RowRejected as error:
        return TracedRow(number, rows, place_text(**place), None, error=error)
    where = place_text(**place, id=id_of(row.values, encoder.config.id_column))
    try:
        candidates = with_variants(candidates_of(recipe, row, encoder.config.keep_columns), row, encoder.config)
    except Exception as error:
        return TracedRow(number, rows, where, row, error=error)
    return TracedRow(number, rows, where, row, tuple(_traced(candidate, encoder) for candidate in candidates))


def _traced(candidate: Candidate, encoder: Encoder) -> TracedCandidate:
    if isinstance(candidate.made, RowRejected):
        return TracedCandidate(candidate, candidate.made)
    try:
        made, outcomes = encode_shortened(candidate.made, encoder)
        return TracedCandidate(replace(candidate, made=made) if made.shortened else candidate, list(outcomes))
    except Exception as error:
        return TracedCandidate(candidate, error)
