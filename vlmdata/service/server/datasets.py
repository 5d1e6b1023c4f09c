"""The datasets that a server offers: those it was given, and all versions of them."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from vlmdata.errors import ConfigMismatchError, DatasetFormatError, UsageError
from vlmdata.format.dataset import VlmDataset
from vlmdata.loader.data import require_one_tokenizer
from vlmdata.media.codecs import require_codecs
from vlmdata.service.protocol import ServedDataset
from vlmdata.storage.shards import DatasetShards
from vlmdata.storage.versions import Version, split_version, versions_at

_log = logging.getLogger("vlmdata.service")

#: Opens a dataset or a version of it: its index, and where its shards are.
type Open = Callable[[str], tuple[VlmDataset, DatasetShards]]


class Datasets:
    """The datasets of a server, by fingerprint. Thread-safe.

    A version that the server was not started with is opened when a client first asks for it, as long as it exists: a
    run goes on with the versions that it began with, also at a server that was restarted since.

    Attributes:
        opened: By fingerprint. A dataset's number, by which workers know it, is its place here.
        names: Their names, by fingerprint.
        shards: Where their shards are, by number.
    """

    def __init__(self, given: Sequence[str | os.PathLike[str]], open_: Open):
        self._open, self._lock = open_, threading.Lock()
        self._given = [split_version(each) for each in given]
        found = [open_(os.fspath(each)) for each in given]
        datasets = [dataset for dataset, _ in found]
        require_one_tokenizer(datasets)
        for dataset in datasets:
            require_codecs(dataset.manifest.features)
        self.opened = {each.manifest.fingerprint: each for each in datasets}
        if len(self.opened) < len(datasets):
            raise UsageError("one of the datasets is given twice")
        self.shards = [shards for _, shards in found]
        # Of a dataset without a list of versions, the only version is the one that is open.
        self._listed: dict[str, tuple[Version, ...]] = {
            place: (Version(number or 1, dataset.manifest.fingerprint),)
            for (place, number), dataset in zip(self._given, datasets, strict=True)
        }
        self._look()
        self._bases = _bases({place: listed[0].fingerprint for place, listed in self._listed.items()})
        self.names = {each.fingerprint: each.name for group in reversed(self.offered()) for each in group}
        self.on_opened: Callable[[DatasetShards], None] = lambda shards: None

    def offered(self) -> tuple[tuple[ServedDataset, ...], tuple[ServedDataset, ...]]:
        """Returns the datasets that a client gets that names none, in the order given, and all by further names."""
        self._look()
        places = [place for place, _ in self._given]
        given, others = list[ServedDataset](), dict[str, str]()
        for place, number in self._given:
            base, listed = self._bases[place], self._listed[place]
            version = next((each for each in listed if each.number == number), listed[-1])
            several = places.count(place) > 1
            given.append(ServedDataset(f"{base}@{version.number}" if several else base, version.fingerprint))
            others |= {f"{base}@{each.number}": each.fingerprint for each in listed}
            if several and version.number == max(each for known, each in self._given if known == place and each):
                others[base] = version.fingerprint
        known = {each.name for each in given}
        return tuple(given), tuple(ServedDataset(name, each) for name, each in others.items() if name not in known)

    def require(self, fingerprint: str) -> VlmDataset:
        """Returns a dataset; opens it if it is a version that is not open yet.

        Raises:
            ConfigMismatchError: If this server has no such dataset.
        """
        if (found := self.opened.get(fingerprint)) is not None:
            return found
        with self._lock:
            if fingerprint not in self.opened:
                self._add(fingerprint)
            return self.opened[fingerprint]

    def _add(self, fingerprint: str) -> None:
        names = {each.fingerprint: each.name for group in self.offered() for each in group}
        place = next(
            (
                f"{place}@{version.number}"
                for place, listed in self._listed.items()
                for version in listed
                if version.fingerprint == fingerprint
            ),
            None,
        )
        if place is None:
            here = ", ".join(f"{name} {each[:16]}" for each, name in names.items())
            raise ConfigMismatchError(
                f"the client wants the dataset with fingerprint {fingerprint[:16]}, the server has {here}. Serve that "
                "dataset, or open the loader again."
            )
        dataset, shards = self._open(place)
        require_codecs(dataset.manifest.features)
        if dataset.manifest.fingerprint != fingerprint:
            raise DatasetFormatError(f"{place}: is not the version that its list of versions names")
        self.on_opened(shards)
        self.shards.append(shards)
        self.names = {**self.names, fingerprint: names[fingerprint]}
        self.opened[fingerprint] = dataset
        _log.info("version opened", extra={"dataset": place})

    def _look(self) -> None:
        """Reads the lists of versions: some may have been made or removed."""
        for place in self._listed:
            try:
                self._listed[place] = versions_at(place) or self._listed[place]
            except DatasetFormatError as error:
                _log.warning("versions cannot be listed", extra={"error": str(error)})


def _bases(first: dict[str, str]) -> dict[str, str]:
    """Returns the name of each place: its folder's, or where several have the same, with its first fingerprint."""
    names = {place: Path(place).name for place in first}
    several = {name for name in names.values() if list(names.values()).count(name) > 1}
    return {place: f"{name}-{first[place][:8]}" if name in several else name for place, name in names.items()}
