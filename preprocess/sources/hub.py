"""Datasets of the Hugging Face hub: found with their files and columns, or opened through ``datasets``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from preprocess.sources.datasets_library import arrow_source, reason_of
from preprocess.sources.rows import Source
from preprocess.sources.splits import choose_split
from vlmdata.errors import SourceError

#: Words in errors of a network that does not respond.
_NETWORK = ("connect", "offline", "resolv", "timed out", "timeout", "network", "unreachable", "proxy")


@dataclass(frozen=True)
class HubDataset:
    """A dataset of the hub, with what is known before downloading.

    Attributes:
        spec: Its id.
        files: Addresses of the split's files with the commit (``hf://datasets/id@commit/file``), in reading order;
            empty if a script or the cache of ``datasets`` makes the rows.
        features: Columns declared by the dataset card; None if it declares none.
    """

    spec: str
    config_name: str | None
    revision: str | None
    split: str
    files: tuple[str, ...]
    features: Any

    @classmethod
    def find(cls, spec: str, split: str | None, config_name: str | None, revision: str | None) -> HubDataset:
        """Finds a dataset on the hub.

        Raises:
            SourceError: If the hub does not respond, or the dataset or split does not exist.
        """
        import datasets

        what = f"SOURCE {spec}"
        with _hub_errors(what):
            builder = datasets.load_dataset_builder(spec, config_name, revision=revision)
        data_files = builder.config.data_files or {}
        name = choose_split(what, dict.fromkeys([*(builder.info.splits or {}), *data_files]), split)
        files = tuple(str(file) for file in data_files.get(name, []))
        return cls(spec, config_name, revision, name, files, builder.info.features)

    @property
    def identity(self) -> Mapping[str, Any]:
        """Identity of the source. A moved branch is a different source, because addresses contain the commit."""
        files = sorted(self.files)
        return {"kind": "hub", "id": self.spec, "config": self.config_name, "split": self.split, "files": files}

    def open(self) -> Source:
        """Opens it through ``datasets``, which downloads it and keeps an Arrow copy."""
        import datasets

        with _hub_errors(f"SOURCE {self.spec}"):
            dataset = datasets.load_dataset(self.spec, self.config_name, revision=self.revision, split=self.split)
        return arrow_source(dataset, self.identity, None)


@contextmanager
def _hub_errors(what: str) -> Iterator[None]:
    """Converts the various failures of ``datasets`` to one line with a remedy."""
    try:
        yield
    except Exception as error:
        raise SourceError(f"{what}: {_problem(error)}") from error


def _problem(error: Exception) -> str:
    chain: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        chain.append(f"{type(cause).__name__} {cause}")
        cause = cause.__cause__ or cause.__context__
    text = " ".join(chain).lower()
    if any(word in text for word in _NETWORK):
        return (
            "not a local path, and the Hugging Face hub cannot be reached (no network, or HF_HUB_OFFLINE is set). "
            "Connect, or download the dataset elsewhere and give its folder."
        )
    return (
        f"not a local path, and the hub does not give it: {reason_of(error)}. "
        "Check the id; for a gated dataset log in with `hf auth login`."
    )
