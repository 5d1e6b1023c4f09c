"""Names of files that stand in a manifest, a list or another stored text: which of them become paths.

A dataset may come from a stranger. A name that its files give must lead into its own folder, so every reader of such
texts asks here, where it reads them. ``docs/decisions/0121-names-in-datasets.md`` says what is refused.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from vlmdata.errors import DatasetFormatError

#: A name of a file or folder: no separator, no control character, no drive.
_NAME = re.compile(r"(?!\.{1,2}$)(?![A-Za-z]:)[^/\\\x00-\x1f\x7f]+")
#: The most bytes of a name that file systems take.
_LONGEST = 255
#: A shard of an earlier version, as the manifest of a later one names it from its folder ``versions/N``.
_OF_EARLIER = re.compile(r"\.\./(?:\.\./|[1-9][0-9]{0,8}/)(?=shard-[^/]*\.tar$)")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def file_name(name: object, what: str) -> str:
    """Returns a name that is that of a file in a folder, without folders.

    Args:
        name: The name, as it stands in a stored text.
        what: Which text, and where in it, for messages.

    Raises:
        DatasetFormatError: If it is anything else, such as a path.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name) or not _is_short(name):
        raise DatasetFormatError(f"{what} is {_shown(name)}, which is not the name of a file in its folder. {_STRANGE}")
    return name


def file_path(name: object, what: str) -> str:
    """Returns a name that leads to a file in a folder or in a folder within it: ``additional/a.jinja``.

    Raises:
        DatasetFormatError: If it is absolute, has ``..``, a backslash, a drive or a control character, or is empty.
    """
    if not isinstance(name, str) or not all(_NAME.fullmatch(part) and _is_short(part) for part in name.split("/")):
        raise DatasetFormatError(f"{what} is {_shown(name)}, which does not lead to a file in its folder. {_STRANGE}")
    return name


def shard_path(name: object, what: str, *, of_version: bool) -> str:
    """Returns the name of a shard. A version after the first also names shards of earlier ones: ``../../shard-0.tar``.

    Raises:
        DatasetFormatError: If it leads anywhere else.
    """
    if of_version and isinstance(name, str) and (earlier := _OF_EARLIER.match(name)):
        file_name(name[earlier.end() :], what)
        return name
    return file_name(name, what)


def sha256_text(value: object, what: str) -> str:
    """Returns a sha256 in hexadecimal; caches name files by it.

    Raises:
        DatasetFormatError: If it is anything else.
    """
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise DatasetFormatError(f"{what} is {_shown(value)}, not a sha256 of 64 hexadecimal digits. {_STRANGE}")
    return value


def path_inside(folder: Path, name: str) -> Path:
    """Returns the path of a file to write or remove in a folder.

    Raises:
        DatasetFormatError: If the name leads out of the folder, or a folder on the way is a link that does.
    """
    path = folder / file_path(name, f"{folder}: a file")
    if path.parent != folder:
        home, parent = os.path.realpath(folder), os.path.realpath(path.parent)
        if os.path.commonpath([home, parent]) != home:
            raise DatasetFormatError(
                f"{path.parent}: is a link to {parent}, which is not in {folder}. Nothing is written or removed there; "
                "replace the link by the folder."
            )
    return path


_STRANGE = "Do not use this dataset if you do not trust where it comes from; otherwise restore the file from a copy."


def _is_short(name: str) -> bool:
    return len(name.encode(errors="replace")) <= _LONGEST


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
