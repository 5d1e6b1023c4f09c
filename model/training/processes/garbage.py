"""When Python looks for garbage. Imports and models leave hundreds of thousands of objects, which a collection visits.

Without this, collections take a seventh of the time of imports. In steps they come at different times on each rank,
and the others wait; in a forward pass, whose graph is new objects, the device waits for the host. So a step collects
when the host has nothing else to do.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

#: New objects at which Python collects by itself. The graph of a micro-batch has several thousand.
_NEW = 50_000
#: Steps after which objects that have survived collections are visited again.
_STEPS = 100


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
    """Collects once, and no longer visits what exists now. Then steps collect (:func:`collect_after_step`).

    Automatic collection remains for what makes more objects than a step.
    """
    gc.collect()
    gc.freeze()
    before = gc.get_threshold()
    gc.set_threshold(_NEW, *before[1:])
    gc.enable()
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def collect_after_micro_batch() -> None:
    """Collects what a forward and a backward pass have left: few objects, once their graph is gone."""
    gc.collect(0)


def collect_after_step(step: int) -> None:
    """Collects new objects, and after some steps older ones too. Call it while the device has work."""
    gc.collect(1 if step % _STEPS else 2)
