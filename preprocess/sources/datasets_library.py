"""Sources that the library ``datasets`` finds or reads: files, image folders, saved datasets, and those of the hub."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmdata.errors import SourceError, with_causes
from vlmdata.format.manifest import canonical_hash
from vlmdata.preprocess.hub import hub_or_cache
from vlmdata.preprocess.sources.data_files import DataFile, relative_name
from vlmdata.preprocess.sources.identity import identify, mark_of
from vlmdata.preprocess.sources.kinds import choose_split
from vlmdata.preprocess.sources.rows import Source
from vlmdata.preprocess.sources.tables import decode_json

_OFFLINE = "no network, or HF_HUB_OFFLINE is set"


@dataclass(frozen=True, eq=False)
class ArrowRows:
    """Rows of a ``datasets.Dataset`` in Arrow format, so images come as stored bytes. Workers map the same files.

    Paths of image files below one of ``image_roots``, names of one folder, become relative to it.
    """

    dataset: Any
    image_roots: tuple[Path, ...] = ()

    def __len__(self) -> int:
        return len(self.dataset)

    def columns(self) -> tuple[str, ...]:
        """All columns; every row has them."""
        return tuple(self.dataset.column_names)

    def values(self, number: int) -> Mapping[str, Any]:
        """Column values of one row."""
        record = self.dataset[number : number + 1].to_pylist()[0]
        features = self.dataset.features
        values = {name: decode_json(value, features[name]) for name, value in record.items()}
        return {name: _relative(value, self.image_roots) for name, value in values.items()}


@dataclass(frozen=True)
class DescribedFolder:
    """A folder that ``datasets`` must find its way in: an image folder, or one whose dataset card describes it.

    Attributes:
        folder: The folder.
        config_name: The requested configuration.
        split: The split to read.
        files: Its files, in reading order.
        reads_all: Whether a row is an object of a file, as far as the card tells, or of a field of one.
    """

    folder: Path
    config_name: str | None
    split: str
    files: tuple[Path, ...]
    reads_all: bool

    @classmethod
    def find(cls, folder: Path, split: str | None, config_name: str | None) -> DescribedFolder:
        """Finds the files of a split by the rules of ``datasets``; a SourceError if there is none such."""
        import datasets

        what = f"SOURCE {folder}"
        with _one_line(what):
            builder = datasets.load_dataset_builder(str(folder), config_name)
        data_files = builder.config.data_files or {}
        name = choose_split(what, data_files, split)
        files = tuple(Path(file) for file in data_files[name])
        return cls(folder, config_name, name, files, _reads_all(builder.config))

    def open(self, image_root: str | None) -> Source:
        """Opens it through ``datasets``. Image paths are relative to ``image_root``, by default the folder."""
        import datasets

        identity = {"kind": "files", "split": self.split, **_identify(self.files, self.folder)}
        with _one_line(f"SOURCE {self.folder}"):
            dataset = datasets.load_dataset(
                str(self.folder), self.config_name, split=self.split, cache_dir=_cache_for(identity)
            )
        # `datasets` gives absolute paths. A copy of the folder elsewhere must have the same rows.
        root = str(self.folder) if image_root is None else image_root
        roots = (Path(os.path.abspath(root)), Path(root).resolve())
        return Source.whole(ArrowRows(dataset.with_format("arrow"), roots), identity, str(self.folder))


def _reads_all(config: Any) -> bool:
    """Returns whether a configuration's rows are the objects of its files, not those of a field in them."""
    return getattr(config, "field", None) is None


def open_saved(path: Path, split: str | None) -> Source:
    """Opens a ``save_to_disk`` folder."""
    from datasets import DatasetDict, load_from_disk

    try:
        loaded = load_from_disk(str(path))
    except Exception as error:
        raise SourceError(f"SOURCE {path}: a save_to_disk folder that does not load: {reason_of(error)}") from error
    splits = loaded if isinstance(loaded, DatasetDict) else {str(loaded.split or "train"): loaded}
    name = choose_split(f"SOURCE {path}", splits, split)
    files = [Path(entry["filename"]) for entry in splits[name].cache_files]
    return arrow_source(splits[name], {"kind": "save_to_disk", "split": name, **_identify(files, path)}, str(path))


def _identify(files: Sequence[Path], root: Path) -> dict[str, Any]:
    """Identifies files by content, which ``datasets`` copies anyway."""
    data = [DataFile.local(file) for file in files]
    marks = [mark_of(file, None, None, hash_source=True) for file in data]
    names = [relative_name(file.place, str(root)) for file in data]
    return identify([(name, file.size, mark) for name, file, mark in zip(names, data, marks, strict=True)])


def arrow_source(dataset: Any, identity: Mapping[str, Any], image_root: str | None) -> Source:
    """Returns the source of a ``datasets.Dataset``."""
    return Source.whole(ArrowRows(dataset.with_format("arrow")), identity, image_root)


def _relative(value: Any, roots: Sequence[Path]) -> Any:
    """Makes the paths of image files below one of ``roots`` relative to it."""
    if isinstance(value, Mapping) and value.keys() == {"bytes", "path"}:
        path = value["path"]
        if value["bytes"] is None and isinstance(path, str):
            for root in roots:
                if Path(path).is_relative_to(root):
                    return {"bytes": None, "path": Path(path).relative_to(root).as_posix()}
    elif isinstance(value, list):
        return [_relative(item, roots) for item in value]
    return value


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Converts the various failures of ``datasets`` to one line."""
    try:
        yield
    except Exception as error:
        if _is_of_no_rows(_root(error)):
            raise SourceError(f"{what}: it has no rows") from error
        raise SourceError(f"{what}: cannot be read through `datasets`: {reason_of(error)}") from error


def _is_of_no_rows(error: BaseException) -> bool:
    """Tells whether ``datasets`` found no rows.

    For a file with columns and no rows, it raises a plain ValueError, so only the text tells. A changed text would give
    the message of ``datasets`` in place of ours.
    """
    from datasets.arrow_writer import SchemaInferenceError

    return isinstance(error, SchemaInferenceError) or (
        isinstance(error, ValueError) and "corresponds to no data" in str(error)
    )


def _cache_for(identity: Mapping[str, Any]) -> str:
    """Returns the folder of the Arrow copy. ``datasets`` identifies files by path and time only; we use the content."""
    import datasets

    return str(Path(datasets.config.HF_DATASETS_CACHE) / "vlmdata" / canonical_hash(identity)[:32])


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def reason_of(error: BaseException) -> str:
    """Returns the innermost cause of an error in one line."""
    root = _root(error)
    lines = str(root).strip().splitlines()
    return f"{type(root).__name__}: {lines[0] if lines else 'no details'}"


def _is_of_network(error: BaseException) -> bool:
    """Tells whether the network does not respond, or is forbidden: ``OfflineModeIsEnabled`` is a ConnectionError."""
    import httpx  # of huggingface_hub
    import requests  # of fsspec's and older parts of it

    kinds = (ConnectionError, TimeoutError, socket.gaierror, httpx.TransportError)
    return isinstance(error, (*kinds, requests.ConnectionError, requests.Timeout))


@dataclass(frozen=True)
class HubDataset:
    """A dataset of the hub, with what is known before downloading.

    Attributes:
        spec: Its id.
        files: Addresses of the split's files with the commit (``hf://datasets/id@commit/file``), in reading order;
            empty if a script or the cache of ``datasets`` makes the rows.
        features: Columns declared by the dataset card; None if it declares none.
        reads_all: Whether rows of JSON files are all their objects, not those of a field.
    """

    spec: str
    config_name: str | None
    revision: str | None
    split: str
    files: tuple[str, ...]
    features: Any
    reads_all: bool

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
        return cls(spec, config_name, revision, name, files, builder.info.features, _reads_all(builder.config))

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
    with hub_or_cache() as silence:
        try:
            yield
        except Exception as error:
            raise SourceError(f"{what}: {_problem(error, silence)}") from error


def _problem(error: Exception, silence: str) -> str:
    if silence or any(_is_of_network(each) for each in with_causes(error)):
        return (
            f"not a local path, and the Hugging Face hub cannot be reached ({silence or _OFFLINE}). "
            "Connect, or download the dataset elsewhere and give its folder."
        )
    return (
        f"not a local path, and the hub does not give it: {reason_of(error)}. "
        "Check the id; for a gated dataset log in with `hf auth login`."
    )
