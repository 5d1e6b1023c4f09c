"""Rows that ``datasets`` reads: JSON files, image folders, saved datasets, and hub datasets that are not Parquet."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preprocess.sources.data_files import DataFile, relative_name
from preprocess.sources.identity import identify, mark_of
from preprocess.sources.rows import Source
from preprocess.sources.splits import choose_split
from preprocess.sources.tables import decode_json
from vlmdata.errors import SourceError
from vlmdata.format.manifest import canonical_hash

#: Errors of ``datasets`` for an empty file.
_NO_ROWS = ("SchemaInferenceError", "corresponds to no data")


@dataclass(frozen=True, eq=False)
class ArrowRows:
    """Rows of a ``datasets.Dataset`` in Arrow format, so images come as stored bytes. Workers map the same files.

    Attributes:
        dataset: The dataset.
        image_roots: Names of the folder that paths of image files become relative to if they are below it.
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


def open_files(builder: str, files: Sequence[Path], split: str | None, root: Path) -> Source:
    """Opens data files of one kind.

    Args:
        builder: Name of the kind in ``datasets``.
        files: The files.
        split: Name of their split, for the identity; None without a split.
        root: Base folder of file names in the identity and of image paths.
    """
    identity = {"kind": "files", **({"split": split} if split else {}), **_identify(files, root)}
    dataset = _guarded(
        f"SOURCE {files[0]}",
        "load_dataset",
        builder,
        data_files=[glob.escape(str(file)) for file in files],
        split="train",
        cache_dir=_cache_for(identity),
    )
    return _source(dataset, identity, str(root))


def open_folder(folder: Path, split: str | None, config_name: str | None, image_root: str | None) -> Source:
    """Opens a folder by the rules of ``datasets``: an image folder, or one whose dataset card describes it.

    Args:
        folder: The folder.
        split: The split to read.
        config_name: The requested configuration.
        image_root: Folder that image paths are relative to; None for ``folder``.
    """
    what = f"SOURCE {folder}"
    builder = _guarded(what, "load_dataset_builder", str(folder), config_name)
    data_files = builder.config.data_files or {}
    name = choose_split(what, data_files, split)
    identity = {"kind": "files", "split": name, **_identify([Path(file) for file in data_files[name]], folder)}
    dataset = _guarded(what, "load_dataset", str(folder), config_name, split=name, cache_dir=_cache_for(identity))
    # `datasets` gives absolute paths. A copy of the folder elsewhere must have the same rows.
    root = str(folder) if image_root is None else image_root
    roots = (Path(os.path.abspath(root)), Path(root).resolve())
    return Source.whole(ArrowRows(dataset.with_format("arrow"), roots), identity, str(folder))


def open_saved(path: Path, split: str | None) -> Source:
    """Opens a ``save_to_disk`` folder."""
    from datasets import DatasetDict, load_from_disk

    try:
        loaded = load_from_disk(str(path))
    except Exception as error:
        raise SourceError(f"SOURCE {path}: a save_to_disk folder that does not load: {_reason(error)}") from error
    splits = loaded if isinstance(loaded, DatasetDict) else {str(loaded.split or "train"): loaded}
    name = choose_split(f"SOURCE {path}", splits, split)
    files = [Path(entry["filename"]) for entry in splits[name].cache_files]
    return _source(splits[name], {"kind": "save_to_disk", "split": name, **_identify(files, path)}, str(path))


@dataclass(frozen=True)
class HubDataset:
    """A dataset of the hub, with what is known before downloading.

    Attributes:
        spec: Its id.
        config_name: The requested configuration.
        revision: The requested revision.
        split: The split to read.
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
        what = f"SOURCE {spec}"
        builder = _guarded(what, "load_dataset_builder", spec, config_name, revision=revision, hub=True)
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
        options = {"revision": self.revision, "split": self.split}
        dataset = _guarded(f"SOURCE {self.spec}", "load_dataset", self.spec, self.config_name, hub=True, **options)
        return _source(dataset, self.identity, None)


def _identify(files: Sequence[Path], root: Path) -> dict[str, Any]:
    """Identifies files by content, which ``datasets`` copies anyway."""
    data = [DataFile.local(file) for file in files]
    marks = [mark_of(file, None, None, hash_source=True) for file in data]
    names = [relative_name(file.place, str(root)) for file in data]
    return identify([(name, file.size, mark) for name, file, mark in zip(names, data, marks, strict=True)])


def _source(dataset: Any, identity: Mapping[str, Any], image_root: str | None) -> Source:
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


def _guarded(what: str, function: str, *arguments: Any, hub: bool = False, **options: Any) -> Any:
    """Calls ``datasets``, and converts its various failures to one line with a remedy."""
    import datasets

    try:
        return getattr(datasets, function)(*arguments, **options)
    except Exception as error:
        if hub:
            raise SourceError(f"{what}: {_hub_problem(error)}") from error
        if any(sign in repr(_root(error)) for sign in _NO_ROWS):
            raise SourceError(f"{what}: it has no rows") from error
        raise SourceError(f"{what}: cannot be read through `datasets`: {_reason(error)}") from error


def _hub_problem(error: Exception) -> str:
    chain: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        chain.append(f"{type(cause).__name__} {cause}")
        cause = cause.__cause__ or cause.__context__
    text = " ".join(chain).lower()
    network = ("connect", "offline", "resolv", "timed out", "timeout", "network", "unreachable", "proxy")
    if any(word in text for word in network):
        return (
            "not a local path, and the Hugging Face hub cannot be reached (no network, or HF_HUB_OFFLINE is set). "
            "Connect, or download the dataset elsewhere and give its folder."
        )
    return (
        f"not a local path, and the hub does not give it: {_reason(error)}. "
        "Check the id; for a gated dataset log in with `hf auth login`."
    )


def _cache_for(identity: Mapping[str, Any]) -> str:
    """Returns the folder of the Arrow copy. ``datasets`` identifies files by path and time only; we use the content."""
    import datasets

    return str(Path(datasets.config.HF_DATASETS_CACHE) / "vlmdata" / canonical_hash(identity)[:32])


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _reason(error: BaseException) -> str:
    root = _root(error)
    lines = str(root).strip().splitlines()
    return f"{type(root).__name__}: {lines[0] if lines else 'no details'}"
