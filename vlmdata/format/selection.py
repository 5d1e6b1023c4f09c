"""Datasets with a part of their source's rows: one side of a holdout, or samples selected from another dataset.

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
from vlmdata.format.schema import IMAGE_FILES, JOINED, SELECTED

SELECTION = "selection"


def origin(source: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the source of the dataset that samples were selected from, perhaps in several steps."""
    while source.get("kind") == SELECTED:
        source = source["dataset"]["source"]
    return source


def require_forms(source: Mapping[str, Any], place: str) -> None:
    """Checks the forms of what readers use of a source, and of the sources of selected and joined datasets.

    Raises:
        KeyError, TypeError, AttributeError: If a field is missing or has another form.
    """
    for name in (IMAGE_FILES, SELECTION, "dataset"):
        if not isinstance(source.get(name), Mapping | None):
            raise TypeError(f"{place}.{name} is {source[name]!r}"[:200])
    if source.get("kind") == SELECTED:
        require_forms(source["dataset"]["source"], f"{place}.dataset.source")
    if source.get("kind") == JOINED:
        for number, each in enumerate(source["datasets"]):
            if type(each["row_offset"]) is not int or not 0 <= each["row_offset"] < 1 << 53:
                raise TypeError(f"{place}.datasets.{number}.row_offset is {each['row_offset']!r}"[:200])
            require_forms(each["source"], f"{place}.datasets.{number}.source")


def has_selected(source: Mapping[str, Any]) -> bool:
    """Returns True if samples were selected, perhaps of one of several joined datasets: lists of rows have gaps."""
    if source.get("kind") == JOINED:
        return any(has_selected(each["source"]) for each in source["datasets"])
    return source.get("kind") == SELECTED


def is_version(source: Mapping[str, Any]) -> bool:
    """Returns True if it is the source of a version after the first: shards may hold samples of earlier versions."""
    return bool((source.get(SELECTION) or {}).get("version"))


def row_offsets(source: Mapping[str, Any]) -> set[int]:
    """Returns what may be added to the row numbers of shards: one number for each dataset that was joined."""
    source = origin(source)
    if source.get("kind") != JOINED:
        return {0}
    return {each["row_offset"] + offset for each in source["datasets"] for offset in row_offsets(each["source"])}


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
