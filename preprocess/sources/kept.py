"""Caches the row counts of a source, so that opening it again reads nothing."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from platformdirs import user_cache_path

from vlmdata.format.atomic import write_atomically
from vlmdata.format.manifest import canonical_hash
from vlmdata.preprocess.sources.data_files import DataFile

#: Sources with fewer bytes on disk are counted again, not cached.
_LEAST_BYTES = 64 << 20
#: File system clocks are coarse: a file modified this recently may be modified again without a new time.
_SETTLED_NS = 2 * 10**9
_FORMAT = 2


def kept[T](
    kind: str,
    files: Sequence[DataFile],
    count: Callable[[], T],
    to_json: Callable[[T], Any],
    from_json: Callable[[Any], T],
) -> T:
    """Returns the cached count of the same files, compared by place, size and version, or counts them now.

    ``kind`` names the kind of the files and the settings of the count. Results are cached as JSON values.
    """
    states = _states(files, time.time_ns())
    if states is None:
        return count()
    path = cache_dir() / f"{canonical_hash([_FORMAT, kind, states])}.json"
    try:
        return from_json(json.loads(path.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError):
        found = count()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(to_json(found)).encode())
    except OSError:  # a full or read-only cache must not stop the run
        pass
    return found


def cache_dir() -> Path:
    """Returns the folder of cached counts: in ``$VLMDATA_CACHE``, else in the user's cache folder."""
    return Path(os.environ.get("VLMDATA_CACHE") or user_cache_path("vlmdata")) / "sources"


def _states(files: Sequence[DataFile], now_ns: int) -> list[list[Any]] | None:
    """Returns the state of the files, on which a count depends; None if unknown, or if counting again is as fast."""
    states: list[list[Any]] = []
    for file in files:
        if file.is_remote:
            if file.version is None:
                return None
            states.append([file.place, file.size, file.version])
        else:
            status = os.stat(file.place)
            if now_ns - max(status.st_mtime_ns, status.st_ctime_ns) < _SETTLED_NS:
                return None
            # The change time and inode detect changes by tools that restore modification times.
            states.append([os.path.abspath(file.place), file.size, file.version, status.st_ctime_ns, status.st_ino])
    if not any(file.is_remote for file in files) and sum(file.size for file in files) < _LEAST_BYTES:
        return None
    return states


def array_to_text(array: npt.NDArray[np.int64]) -> str:
    """Encodes an int64 array (n,) as text."""
    return base64.b64encode(array.astype("<i8").tobytes()).decode()


def array_from_text(text: str) -> npt.NDArray[np.int64]:
    """Decodes the result of :func:`array_to_text`."""
    return np.frombuffer(base64.b64decode(text), "<i8").astype(np.int64)
