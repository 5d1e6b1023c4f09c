"""Processors of a model, as transformers reads them."""

from __future__ import annotations

from typing import Any


def read_processor(kind: str, model: str) -> Any:
    """Reads a processor of a model, a folder or a hub id; None if it has none that can be read.

    ``kind`` is a class of transformers: ``AutoImageProcessor``, ``AutoVideoProcessor``.
    """
    import transformers

    load: Any = getattr(transformers, kind).from_pretrained
    try:
        return load(model, trust_remote_code=False)
    except Exception:  # many kinds, of the hub, of files, and of classes that are not installed
        return None
