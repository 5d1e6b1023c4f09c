"""Places that the user names: which are local, and where a dataset can be made."""

from __future__ import annotations

import re
from pathlib import Path

from vlmdata.errors import SourceError
from vlmdata.locations import without_file_scheme

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def local_source(spec: str) -> str:
    """The source as a path, hub id or ``demo``; a ``file:///…`` URL becomes a path.

    Raises:
        SourceError: If it is another URL.
    """
    spec = without_file_scheme(spec)
    if spec.startswith("hf://datasets/"):
        raise SourceError(f"SOURCE {spec}: give a hub dataset by its id alone, such as naver-clova-ix/cord-v2")
    if _URL.match(spec):
        raise SourceError(
            f"SOURCE {spec}: sources are local files, local folders and hub datasets; other URLs cannot be read yet. "
            "Download or mount it, and give the local path."
        )
    return spec


def output_directory(out: str) -> Path:
    """The folder that ``--out`` names; a ``file:///…`` URL becomes a path.

    Raises:
        SourceError: If it is another URL, or a file stands in the way.
    """
    out = without_file_scheme(out)
    if match := _URL.match(out):
        raise SourceError(
            f"--out {out}: datasets are made in local folders; {match[1]}:// cannot be written yet. "
            "Give a local folder and copy it there when it is finished."
        )
    directory = Path(out)
    for place in (directory, *directory.parents):
        if place.is_dir():
            break
        if place.exists():
            inside = "" if place == directory else f", so there can be no folder {directory}"
            raise SourceError(f"--out {out}: {place} is a file{inside}. --out names a folder, made if absent.")
    return directory
