"""Inspection of a dataset: what the model will see, as dataclasses, in the terminal and in the browser.

``describe_dataset``, ``describe_sample``, ``describe_batch``, ``describe_step`` and ``describe_row`` return frozen
dataclasses and draw nothing. ``terminal/``, ``page/`` and ``server.py`` draw them and do not read shards.
``docs/inspect.md`` is the user guide.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlmdata.inspect.batch import BatchDescription, describe_batch
    from vlmdata.inspect.dataset import DatasetCard, describe_dataset
    from vlmdata.inspect.sample import SampleDescription, describe_sample
    from vlmdata.inspect.trace import RowTrace, StepDescription, describe_row, describe_step

_EXPORTS = {
    "batch": ("BatchDescription", "describe_batch"),
    "dataset": ("DatasetCard", "describe_dataset"),
    "sample": ("SampleDescription", "describe_sample"),
    "trace": ("RowTrace", "StepDescription", "describe_row", "describe_step"),
}

__all__ = [
    "BatchDescription",
    "DatasetCard",
    "RowTrace",
    "SampleDescription",
    "StepDescription",
    "describe_batch",
    "describe_dataset",
    "describe_row",
    "describe_sample",
    "describe_step",
]


def __getattr__(name: str) -> Any:
    # Batches need torch, which takes seconds to import. A card does not.
    for module, names in _EXPORTS.items():
        if name in names:
            return getattr(import_module(f"vlmdata.inspect.{module}"), name)
    raise AttributeError(f"module 'vlmdata.inspect' has no attribute {name!r}")
