"""Resolves the user's source and output locations."""

from __future__ import annotations

import re
from pathlib import Path

from vlmdata.errors import SourceError
from vlmdata.locations import is_url, place_of, without_file_scheme
from vlmdata.storage import Store, open_store

_HUB_DATASET = re.compile(r"hf://datasets/[^/]+(/[^/]+)?/?")


def source_place(spec: str) -> str:
    """Returns the source as a path, URL, hub id or ``demo``; a ``file:///…`` URL becomes a path.

    Raises:
        SourceError: If it is empty, or the URL of a whole hub dataset.
    """
    spec = without_file_scheme(spec)
    if not spec:
        raise SourceError('SOURCE is empty, like "$DATA" if DATA is not set; "." is the current folder')
    if _HUB_DATASET.fullmatch(spec):
        raise SourceError(f"SOURCE {spec}: give only the id of a hub dataset, such as naver-clova-ix/cord-v2")
    return spec


def output_store(out: str, called: str = "--out") -> Store:
    """Returns the store at a command's output, its option ``called``: a folder, or the URL of one in an object store.

    Raises:
        SourceError: If the path, or part of it, is a file.
        UsageError: If writes to such a URL are not atomic.
    """
    place = place_of(out)
    if not is_url(place):
        _refuse_file(f"{called} {out}", Path(place))
    return open_store(place)


def _refuse_file(what: str, directory: Path) -> None:
    for place in (directory, *directory.parents):
        if place.is_dir():
            return
        if place.exists():
            inside = "" if place == directory else f", so the folder {directory} cannot exist"
            raise SourceError(f"{what}: {place} is a file{inside}. Give a folder.")
