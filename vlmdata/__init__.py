"""vlmdata: packed vision-language training data, prepared once and streamed at memory speed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlmdata.format.dataset import VlmDataset, open_dataset
    from vlmdata.format.schema import Sample

__version__ = "0.1.0"

# Loaded on first use: `vlmdata --help` must not pay for numpy, pyarrow or torch.
_EXPORTS = {
    "Sample": "vlmdata.format.schema",
    "VlmDataset": "vlmdata.format.dataset",
    "open_dataset": "vlmdata.format.dataset",
}

__all__ = ["Sample", "VlmDataset", "open_dataset"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'vlmdata' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_EXPORTS[name]), name)
