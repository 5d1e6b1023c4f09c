"""When Python looks for garbage. Imports and models leave hundreds of thousands of objects, which a collection visits.

Without this, collections take a seventh of the time of imports. In steps they come at different times on each rank,
and the others wait.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collected_later() -> Iterator[None]:
    """Turns automatic collection off, for imports and the building of a model. Nothing there is worth the search."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def only_new_objects_collected() -> Iterator[None]:
    """Collects once, and then automatically, but no longer visits what exists now."""
    gc.collect()
    gc.freeze()
    gc.enable()
    try:
        yield
    finally:
        gc.unfreeze()
