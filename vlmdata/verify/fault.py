"""A fault found by an audit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        file: File name within the dataset.
        check: Short name of the check that failed.
        message: What was found and what was expected.
        row: Source row, if the fault belongs to a sample.
        key: Sample key, if the fault belongs to a sample.
    """

    file: str
    check: str
    message: str
    row: int | None = None
    key: str | None = None

    def __str__(self) -> str:
        where = self.file if self.key is None else f"{self.file} row {self.row} key {self.key}"
        return f"{where}: {self.check}: {self.message}"
