"""Inspection of a dataset: what the model will see, as dataclasses, in the terminal and in the browser.

``describe_dataset``, ``describe_sample``, ``describe_batch``, ``describe_step`` and ``describe_row`` return frozen
dataclasses and draw nothing. ``terminal/``, ``page/`` and ``server.py`` draw them and do not read shards.
``docs/inspect.md`` is the user guide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlmdata.inspect.batch import BatchDescription, describe_batch
    from vlmdata.inspect.dataset import DatasetCard, describe_dataset
    from vlmdata.inspect.sample import SampleDescription, describe_sample
    from vlmdata.inspect.trace import RowTrace, StepDescription, describe_row, describe_step

_EXPORTS = {
    "BatchDescription": "vlmdata.inspect.batch",
    "DatasetCard": "vlmdata.inspect.dataset",
    "RowTrace": "vlmdata.inspect.trace",
    "SampleDescription": "vlmdata.inspect.sample",
    "StepDescription": "vlmdata.inspect.trace",
    "describe_batch": "vlmdata.inspect.batch",
    "describe_dataset": "vlmdata.inspect.dataset",
    "describe_row": "vlmdata.inspect.trace",
    "describe_sample": "vlmdata.inspect.sample",
    "describe_step": "vlmdata.inspect.trace",
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
    if name not in _EXPORTS:
        raise AttributeError(f"module 'vlmdata.inspect' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_EXPORTS[name]), name)
