"""What servers of processes do with the modules that they import for all that they fork."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loaded() -> Iterator[None]:
    """Lets a failed import end the server. Python's own would go on without, and each process would import the rest."""
    try:
        yield
    except ImportError as error:
        raise RuntimeError("what the server of processes should import cannot be") from error


def settled() -> None:
    """Ends the imports: the collector need not look through all of torch in every process."""
    gc.collect()
    gc.freeze()
