"""vlmdata: packed vision-language training data, prepared once and streamed to GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vlmdata.version import __version__ as __version__

if TYPE_CHECKING:
    from vlmdata.batch import PackedBatch
    from vlmdata.format.dataset import VlmDataset
    from vlmdata.format.schema import Sample
    from vlmdata.loader.config import LoaderConfig
    from vlmdata.loader.loader import StreamingLoader
    from vlmdata.packing.config import Blend
    from vlmdata.storage.open import open_dataset

# Loaded on first use, so that `vlmdata --help` does not import numpy, pyarrow or torch.
_EXPORTS = {
    "Blend": "vlmdata.packing.config",
    "LoaderConfig": "vlmdata.loader.config",
    "PackedBatch": "vlmdata.batch",
    "Sample": "vlmdata.format.schema",
    "StreamingLoader": "vlmdata.loader.loader",
    "VlmDataset": "vlmdata.format.dataset",
    "open_dataset": "vlmdata.storage.open",
}

__all__ = ["Blend", "LoaderConfig", "PackedBatch", "Sample", "StreamingLoader", "VlmDataset", "open_dataset"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'vlmdata' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
