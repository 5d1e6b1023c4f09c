"""Datasets with a part of their source's rows, such as one side of a holdout.

Rows keep their numbers in the source. The manifest's ``source`` then has an entry ``selection`` with the number of rows
in the whole source and a hash of the chosen row numbers, so that an audit can check which rows must be present.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vlmdata.errors import DatasetFormatError

SELECTION = "selection"


@dataclass(frozen=True)
class Selection:
    """The rows of a source in a dataset."""

    of_rows: int  # number of rows in the whole source
    rows_sha256: str  # sha256 of the chosen row numbers, ascending, as little-endian int64

    @classmethod
    def read(cls, source: Mapping[str, Any]) -> Selection | None:
        """Reads the selection from a manifest's ``source``; None if the dataset has all rows.

        Raises:
            DatasetFormatError: If the selection is malformed.
        """
        fields = source.get(SELECTION)
        if fields is None:
            return None
        try:
            return cls(int(fields["of_rows"]), str(fields["rows_sha256"]))
        except (KeyError, TypeError, ValueError) as error:
            raise DatasetFormatError(f"manifest.json: source.{SELECTION} has the wrong form: {fields!r}") from error

    def names(self, rows: npt.NDArray[np.int64]) -> bool:
        """Returns True if these are the chosen rows, ascending."""
        return rows_digest(rows) == self.rows_sha256


def rows_digest(rows: npt.NDArray[np.int64]) -> str:
    """Returns the sha256 of row numbers as little-endian int64, in hexadecimal."""
    return hashlib.sha256(np.ascontiguousarray(rows, dtype="<i8").tobytes()).hexdigest()
