"""Finds the versions of datasets that a run used: it goes on with these, also when there are newer ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

from vlmdata.storage.versions import named_version, split_version

if TYPE_CHECKING:
    from vlmdata.loader.data import BatchService


def saved_versions(
    data: Sequence[str | PathLike[str]],
    datasets: Sequence[tuple[str, str]],
    state: Mapping[str, Any],
    service: BatchService | None = None,
) -> list[str | PathLike[str]] | None:
    """Returns the data of a loader with the versions that a state was saved with; None if these are open.

    A version that the user named is kept: the state is then of another run.

    Args:
        data: Locations of the loader's datasets.
        datasets: Name and fingerprint of each.
        state: The saved state; what is no state is left to others.
        service: The service that has the datasets, if it is not this machine that reads them.
    """
    try:
        saved = [str(each["fingerprint"]) for each in state["datasets"]]
    except (KeyError, TypeError):
        return None
    if service is not None:  # an address may stand for several datasets; each has a name of its own
        data = [name for name, _ in datasets]
    find = pinned if service is None else service.pinned
    opened, found = {fingerprint for _, fingerprint in datasets}, list(data)
    for number, (location, (_, fingerprint), wanted) in enumerate(zip(data, datasets, saved, strict=False)):
        if fingerprint != wanted and wanted not in opened:
            found[number] = find(fspath(location), wanted) or location
    return None if found == list(data) else found


def pinned(location: str | PathLike[str], fingerprint: str) -> str | None:
    """Returns the version with this fingerprint of a dataset of which no version is named; None if there is none."""
    return None if split_version(location)[1] is not None else named_version(location, fingerprint)
