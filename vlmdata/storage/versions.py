"""Versions of a dataset: which there are, and where the files of each one are.

The first version is the dataset's folder itself. Version N is the folder ``versions/N`` in it: a dataset of its own,
whose manifest names shards of earlier versions by ``../../``. ``versions.json`` lists the versions, oldest first. It is
written last, so a version exists whole or not at all. ``DIR@N`` names a version, ``DIR`` the newest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory

from vlmdata.errors import DatasetFormatError, UsageError, with_causes
from vlmdata.format.schema import VERSIONS_DIR, VERSIONS_NAME
from vlmdata.locations import is_url, place_of, within
from vlmdata.storage.base import Store
from vlmdata.storage.download import download

_FORMAT = "vlmdata-versions"
_NAMED = re.compile(r"(?P<place>.+)@(?P<number>[1-9][0-9]*)")
_IN_FOLDER = re.compile(rf"(?P<place>.+)/{VERSIONS_DIR}/(?P<number>[1-9][0-9]*)")


@dataclass(frozen=True)
class Version:
    """A version of a dataset."""

    number: int  # from 1, in the order in which they were made
    fingerprint: str  # of its manifest

    @property
    def folder(self) -> str:
        """Name of its folder in the dataset; empty for the first."""
        return folder_of(self.number)


def folder_of(number: int) -> str:
    """Returns the name of a version's folder in the dataset; empty for the first."""
    return "" if number == 1 else f"{VERSIONS_DIR}/{number}"


def store_of_version(store: Store, number: int) -> Store:
    """Returns the store of a version's files.

    Raises:
        DatasetFormatError: If its folder is a link that leaves the dataset.
    """
    return store.within(folder_of(number)) if number > 1 else store


def versions_to_json(versions: Sequence[Version]) -> bytes:
    """Returns the content of ``versions.json``."""
    fields = {"format": _FORMAT, "versions": [asdict(each) for each in versions]}
    return (json.dumps(fields, indent=2) + "\n").encode()


def versions_in(store: Store) -> tuple[Version, ...]:
    """Returns the versions that a store lists, oldest first; empty if the dataset has only its first.

    Raises:
        DatasetFormatError: If the list is damaged.
    """
    try:
        return _parsed(store.read(VERSIONS_NAME), store.path(VERSIONS_NAME))
    except FileNotFoundError:
        return ()


def versions_at(place: str) -> tuple[Version, ...]:
    """Returns the same for a folder or a URL of any file system.

    Raises:
        DatasetFormatError: If the list is damaged, or cannot be fetched.
    """
    path = within(place, VERSIONS_NAME)
    try:
        return _parsed(_fetched(path) if is_url(place) else Path(path).read_bytes(), path)
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except OSError as error:
        raise DatasetFormatError(f"{path}: cannot be read: {error.strerror or error}") from error


def place_of_version(location: str | PathLike[str], version: int | None = None) -> str:
    """Returns the folder or URL with the files of one version of a dataset.

    Args:
        location: The dataset, or a version of it as ``DIR@2`` or ``DIR/versions/2``.
        version: Number of the version; None is the newest, unless the location names one.

    Raises:
        UsageError: If there is no such version.
        DatasetFormatError: If the list of versions is damaged, or cannot be fetched.
    """
    place, named = split_version(location)
    if version is not None and named not in (None, version):
        raise UsageError(f"{place_of(location)}: names version {named}, but version {version} is asked for")
    wanted = named if version is None else version
    found = versions_at(place)
    if wanted is None or (version is None and not found and _IN_FOLDER.fullmatch(place_of(location))):
        place = place_of(location)  # a folder of this name need not be a version
        return within(place, found[-1].folder) if found else place
    if wanted not in ([each.number for each in found] or [1]):
        listed = ", ".join(str(each.number) for each in found) or "only 1"
        gone = " It was pruned." if found and wanted < found[-1].number else ""
        raise UsageError(f"{place}: has no version {wanted}.{gone} It has {listed}; without a number, the newest")
    return within(place, folder_of(wanted))


def split_version(location: str | PathLike[str]) -> tuple[str, int | None]:
    """Returns the place of a dataset, and the version that a location names; None if it names none.

    A folder whose own name ends in ``@2`` is that folder.
    """
    place = place_of(location)
    if (match := _IN_FOLDER.fullmatch(place)) or ((match := _NAMED.fullmatch(place)) and not _exists(place)):
        return match["place"].rstrip("/"), int(match["number"])
    return place, None


def named_version(location: str | PathLike[str], fingerprint: str) -> str | None:
    """Returns the name, ``DIR@2``, of the version with this fingerprint; None if there is none.

    Raises:
        DatasetFormatError: If the list of versions is damaged, or cannot be fetched.
    """
    place, _ = split_version(location)
    return next((f"{place}@{each.number}" for each in versions_at(place) if each.fingerprint == fingerprint), None)


def _exists(place: str) -> bool:
    return not is_url(place) and Path(place).exists()


def _fetched(url: str) -> bytes:
    with TemporaryDirectory(prefix="vlmdata-") as folder:
        path = Path(folder) / VERSIONS_NAME
        try:
            download(url, path, None)
        except DatasetFormatError as error:
            # Stores deny the existence of a file this way to whoever may not list.
            if any(isinstance(each, PermissionError) for each in with_causes(error)):
                raise FileNotFoundError(url) from error
            raise
        return path.read_bytes()


def _parsed(content: bytes, path: str) -> tuple[Version, ...]:
    try:
        fields = json.loads(content)
        if fields["format"] != _FORMAT:
            raise ValueError(f"format is {fields['format']!r}")
        found = tuple(Version(each["number"], str(each["fingerprint"])) for each in fields["versions"])
        numbers = [each.number for each in found]
        numbered = all(type(number) is int and 1 <= number < 10**9 for number in numbers)  # folders are named so
        if not numbers or not numbered or numbers != sorted(set(numbers)):
            raise ValueError(f"the numbers are {numbers}"[:200])
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        raise DatasetFormatError(
            f"{path}: is not a list of versions: {error}. Restore it from a copy. A version can be opened without it, "
            f"by its folder {VERSIONS_DIR}/N."
        ) from error
    return found
