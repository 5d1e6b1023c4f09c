"""Rows of a source, whatever it is: opened through ``datasets``, read by number, nothing decoded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from preprocess.recipes.base import Row
from preprocess.reject import RowRejected, excerpt
from vlmdata.format.ledger import Reason


@dataclass(frozen=True, eq=False)
class Source:
    """An opened source. Cheap to pickle: worker processes map the same Arrow files.

    Attributes:
        dataset: A ``datasets.Dataset`` in Arrow format, so images come as stored bytes.
        json_lines: Whether rows are lines of JSON text in a single column ``text``.
        identity: What the source is, by content, for the manifest.
        image_root: Folder that relative image paths mean when the user names none; None for remote sources.
    """

    dataset: Any
    json_lines: bool
    identity: Mapping[str, Any]
    image_root: str | None

    @property
    def num_rows(self) -> int:
        """Rows in the source."""
        return len(self.dataset)

    def row(self, number: int) -> Row:
        """One row.

        Raises:
            RowRejected: MALFORMED_ROW if it is a line that is not a JSON object.
        """
        record = self.dataset[number : number + 1].to_pylist()[0]
        if self.json_lines:
            return Row(number, _parse_line(record["text"]))
        features = self.dataset.features
        return Row(number, {name: _decode_json(value, features[name]) for name, value in record.items()})


def _parse_line(line: str) -> Mapping[str, Any]:
    if not line.strip():
        raise RowRejected(Reason.MALFORMED_ROW, "a blank line")
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RowRejected(Reason.MALFORMED_ROW, f"not JSON: {error}: {excerpt(line)}") from error
    if not isinstance(values, dict):
        raise RowRejected(Reason.MALFORMED_ROW, f"not a JSON object: {excerpt(line)}")
    return values


def _decode_json(value: Any, feature: Any) -> Any:
    """Values of ``datasets``' Json features are JSON text in Arrow; everything else is itself."""
    if value is None:
        return None
    if isinstance(feature, Mapping):
        return {name: _decode_json(value.get(name), inner) for name, inner in feature.items()}
    if type(feature).__name__ == "Json":
        return json.loads(value) if isinstance(value, str | bytes) else value
    inner = getattr(feature, "feature", None)
    if inner is not None and isinstance(value, list):
        return [_decode_json(item, inner) for item in value]
    return value
