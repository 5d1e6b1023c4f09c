"""Rows that ``datasets`` reads: parquet, Arrow and JSON files, image folders, saved datasets, hub ids."""

from __future__ import annotations

import glob
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preprocess.sources.identity import identify
from preprocess.sources.rows import Source
from preprocess.sources.splits import choose_split
from vlmdata.errors import SourceError
from vlmdata.format.manifest import canonical_hash

#: How ``datasets`` says that there is nothing in a file.
_NO_ROWS = ("SchemaInferenceError", "corresponds to no data")


@dataclass(frozen=True, eq=False)
class ArrowRows:
    """Rows of a ``datasets.Dataset`` in Arrow format, so images come as stored bytes. Workers map the same files."""

    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)

    def columns(self) -> tuple[str, ...]:
        """All columns; every row has them."""
        return tuple(self.dataset.column_names)

    def values(self, number: int) -> Mapping[str, Any]:
        """Column values of one row."""
        record = self.dataset[number : number + 1].to_pylist()[0]
        features = self.dataset.features
        return {name: _decode_json(value, features[name]) for name, value in record.items()}


def open_files(builder: str, files: Sequence[Path], split: str | None, root: Path) -> Source:
    """Opens data files of one kind.

    Args:
        builder: ``datasets``' name of the kind.
        files: The files.
        split: Name of the split they are, for the identity; None if they are none.
        root: Folder that file names in the identity, and image paths, are relative to.
    """
    identity = {"kind": "files", **({"split": split} if split else {}), **identify(files, root)}
    dataset = _guarded(
        f"SOURCE {files[0]}",
        "load_dataset",
        builder,
        data_files=[glob.escape(str(file)) for file in files],
        split="train",
        cache_dir=_cache_for(identity),
    )
    return _source(dataset, identity, str(root))


def open_folder(folder: Path, split: str | None, config_name: str | None) -> Source:
    """Opens a folder as ``datasets`` understands it: an image folder, or one with a dataset card that says how."""
    what = f"SOURCE {folder}"
    builder = _guarded(what, "load_dataset_builder", str(folder), config_name)
    data_files = builder.config.data_files or {}
    name = choose_split(what, data_files, split)
    identity = {"kind": "files", "split": name, **identify([Path(file) for file in data_files[name]], folder)}
    dataset = _guarded(what, "load_dataset", str(folder), config_name, split=name, cache_dir=_cache_for(identity))
    return _source(dataset, identity, str(folder))


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
    return _source(splits[name], {"kind": "save_to_disk", "split": name, **identify(files, path)}, str(path))


def open_hub(spec: str, split: str | None, config_name: str | None, revision: str | None) -> Source:
    """Opens a dataset of the Hugging Face hub."""
    what = f"SOURCE {spec}"
    builder = _guarded(what, "load_dataset_builder", spec, config_name, revision=revision, hub=True)
    names = dict.fromkeys([*(builder.info.splits or {}), *(builder.config.data_files or {})])
    name = choose_split(what, names, split)
    dataset = _guarded(what, "load_dataset", spec, config_name, revision=revision, split=name, hub=True)
    # Resolved addresses hold the commit (hf://datasets/id@commit/file), so a moved branch is another source.
    files = sorted(str(file) for file in (builder.config.data_files or {}).get(name, []))
    return _source(dataset, {"kind": "hub", "id": spec, "config": config_name, "split": name, "files": files}, None)


def _source(dataset: Any, identity: Mapping[str, Any], image_root: str | None) -> Source:
    return Source.whole(ArrowRows(dataset.with_format("arrow")), identity, image_root)


def _decode_json(value: Any, feature: Any) -> Any:
    """Values of ``datasets``' Json features are JSON text in Arrow; everything else is itself."""
    if value is None:
        return None
    if isinstance(feature, Mapping):
        return {name: _decode_json(value.get(name), inner) for name, inner in feature.items()}
    if type(feature).__name__ == "Json":
        return json.loads(value) if isinstance(value, str | bytes) else value
    inner = getattr(feature, "feature", None)
    if inner is not None and isinstance(value, list):
        return [_decode_json(item, inner) for item in value]
    return value


def _guarded(what: str, function: str, *arguments: Any, hub: bool = False, **options: Any) -> Any:
    """Calls into ``datasets``, with its many kinds of failure turned into one line that names a remedy."""
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
    """Where ``datasets`` keeps its Arrow copy. It knows a file by path and time alone; we promise its content."""
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
