"""Trying a request again where that can help."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

#: Seconds before the second, third, … attempt. File systems and their clients have tried several times before each.
PAUSES = (0.5, 1.0, 2.0, 4.0)
#: No such object, no right to it, or no package for it: trying again changes nothing.
FINAL: tuple[type[Exception], ...] = (FileNotFoundError, PermissionError, ImportError, NotImplementedError)


class AttemptsFailed(Exception):
    """Each attempt failed.

    Attributes:
        attempts: How many there were.
        last: What the last one raised.
    """

    def __init__(self, attempts: int, last: Exception):
        said = str(last).strip().splitlines()
        super().__init__(
            f"{attempts} attempts failed, the last with {type(last).__name__}: {said[0] if said else 'no details'}"
        )
        self.attempts = attempts
        self.last = last


#: All that :func:`attempts` raises by default.
FAILED: tuple[type[Exception], ...] = (AttemptsFailed, *FINAL)


def attempts[T](request: Callable[[], T], final: tuple[type[Exception], ...] = FINAL) -> T:
    """Makes a request until it succeeds, with growing pauses. Exceptions of ``final`` are raised at once.

    Raises:
        AttemptsFailed: If it failed each time.
    """
    for pause in (*PAUSES, None):
        try:
            return request()
        except final:
            raise
        except Exception as error:  # each file system has its own
            if pause is None:
                raise AttemptsFailed(len(PAUSES) + 1, error) from error
        time.sleep(pause * random.uniform(0.75, 1.25))  # many workers should not come back at once
    raise AssertionError("unreachable")
