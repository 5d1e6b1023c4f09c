"""A row of a source, as recipes get it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """A source row.

    Attributes:
        number: Position in the source split.
        values: Column values; images are undecoded ``{"bytes": …, "path": …}`` mappings.
    """

    number: int
    values: Mapping[str, Any]
