"""Opening a source by what the user typed: the demo, a file, a folder, a saved dataset, or a hub id."""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from preprocess.sources.rows import Source
from vlmdata.errors import SourceError
from vlmdata.format.manifest import canonical_hash

DEMO = "demo"
DEMO_ROWS = 64
_BUILDERS: Mapping[str, str] = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".jsonl": "text",
    ".ndjson": "text",
    ".json": "json",
}
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
#: How ``datasets`` says that there is nothing in a file.
_NO_ROWS = ("SchemaInferenceError", "corresponds to no data")
_CHUNK = 1 << 22
#: More files than this are identified by one hash over their listing.
_LISTED_FILES = 256


def open_source(
    spec: str,
    *,
    layout: str = "cord_v2",
    split: str | None = None,
    config_name: str | None = None,
    revision: str | None = None,
    limit: int | None = None,
    drawn: Callable[[int], None] | None = None,
) -> Source:
    """Opens a source of rows.

    Args:
        spec: ``demo``, a path (file, folder, glob, or ``save_to_disk`` folder), or a hub dataset id.
        layout: Row layout of the demo: the recipe's name.
        split: Split to read; by default ``train`` if there is one, else the only one.
        config_name: Hub configuration (subset).
        revision: Hub branch, tag or commit.
        limit: Read only the first so many rows. For the demo: how many to draw.
        drawn: Called with the number of demo rows drawn so far.

    Raises:
        SourceError: If it cannot be opened; the message says what to do.
    """
    if limit is not None and limit < 1:
        raise SourceError(f"--limit {limit}: it must be at least 1")
    if spec == DEMO:
        source = _demo(layout, limit or DEMO_ROWS, drawn)
    elif (path := Path(spec)).exists() or glob.has_magic(spec):
        source = _local(path, split, config_name)
    elif _HUB_ID.fullmatch(spec) and path.suffix not in _BUILDERS:
        source = _hub(spec, split, config_name, revision)
    else:
        raise SourceError(f"SOURCE {spec}: no such file or folder, and not a hub dataset id either")
    if source.num_rows == 0:
        raise SourceError(f"SOURCE {spec}: it has no rows")
    return _limited(source, limit)


def _limited(source: Source, limit: int | None) -> Source:
    rows = source.num_rows if limit is None else min(limit, source.num_rows)
    dataset = source.dataset if rows == source.num_rows else source.dataset.select(range(rows))
    return Source(dataset, source.json_lines, {**source.identity, "rows": rows}, source.image_root)


def _demo(layout: str, rows: int, on_row: Callable[[int], None] | None) -> Source:
    from preprocess.sources.demo import DEMO_VERSION, ensure_demo_dataset

    if layout not in ("cord_v2", "chat"):
        raise SourceError(f"SOURCE demo: it has rows for the recipes cord_v2 and chat, not for {layout}")
    directory = ensure_demo_dataset(layout, rows, progress=on_row)  # type: ignore[arg-type]
    drawn = _local(directory, "train")
    # What was drawn is known by its version; where it is cached says nothing.
    identity = {"kind": "demo", "layout": layout, "version": DEMO_VERSION, "files": drawn.identity["files"]}
    return Source(drawn.dataset, drawn.json_lines, identity, None)


def _local(path: Path, split: str | None, config_name: str | None = None) -> Source:
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        return _saved(path, split)
    if path.is_dir():
        return _folder(path, split, config_name)
    # A name that exists is meant literally, brackets and all.
    matched = [str(path)] if path.exists() else sorted(glob.glob(str(path), recursive=True))
    files = [Path(name) for name in matched if Path(name).is_file()]
    builder = _one_builder(path, files)
    return _files(builder, files, split, files[0].parent)


def _one_builder(shown: Path, files: Sequence[Path]) -> str:
    builders = {_BUILDERS.get(file.suffix) for file in files}
    known = ", ".join(_BUILDERS)
    if not files:
        raise SourceError(f"SOURCE {shown}: no file matches")
    builder = builders.pop()
    if builders or builder is None:
        found = ", ".join(sorted({file.suffix or file.name for file in files}))
        raise SourceError(f"SOURCE {shown}: files of one kind of {known} are read, not {found}")
    return builder


def _folder(folder: Path, split: str | None, config_name: str | None) -> Source:
    """A folder laid out as on the hub: splits by file or folder name, or an image folder with ``metadata.jsonl``."""
    what = f"SOURCE {folder}"
    if glob.has_magic(str(folder.resolve())):
        raise SourceError(
            f"{what}: `datasets` takes a folder whose path holds *, ? or [ for a pattern; "
            "rename it, link to it by another name, or give its files"
        )
    builder = _guarded(what, "load_dataset_builder", str(folder), config_name)
    data_files = builder.config.data_files or {}
    name = _choose_split(what, data_files, split)
    files = [Path(file) for file in data_files[name]]
    if all(_BUILDERS.get(file.suffix) == "text" for file in files):
        return _files("text", files, None, folder)
    identity = {"kind": "files", "split": name, **_identify(files, folder)}
    dataset = _guarded(what, "load_dataset", str(folder), config_name, split=name, cache_dir=_cache_for(identity))
    return Source(dataset.with_format("arrow"), False, identity, str(folder))


def _files(builder: str, files: Sequence[Path], split: str | None, root: Path) -> Source:
    what = f"SOURCE {files[0]}"
    if split not in (None, "train"):
        raise SourceError(f"{what}: a data file has no splits, so --split {split} names nothing; leave it out")
    # Lines are read as text and parsed one by one, so one bad line costs one row and mixed types cost nothing.
    options: dict[str, Any] = {"sample_by": "line", "encoding": "utf-8-sig", "encoding_errors": "backslashreplace"}
    identity = {"kind": "files", **_identify(files, root)}
    dataset = _guarded(
        what,
        "load_dataset",
        builder,
        data_files=[glob.escape(str(file)) for file in files],
        split="train",
        cache_dir=_cache_for(identity),
        **(options if builder == "text" else {}),
    )
    return Source(dataset.with_format("arrow"), builder == "text", identity, str(root))


def _saved(path: Path, split: str | None) -> Source:
    from datasets import DatasetDict, load_from_disk

    try:
        loaded = load_from_disk(str(path))
    except Exception as error:
        raise SourceError(f"SOURCE {path}: a save_to_disk folder that does not load: {_reason(error)}") from error
    splits = loaded if isinstance(loaded, DatasetDict) else {str(loaded.split or "train"): loaded}
    name = _choose_split(f"SOURCE {path}", splits, split)
    files = [Path(entry["filename"]) for entry in splits[name].cache_files]
    identity = {"kind": "save_to_disk", "split": name, **_identify(files, path)}
    return Source(splits[name].with_format("arrow"), False, identity, str(path))


def _hub(spec: str, split: str | None, config_name: str | None, revision: str | None) -> Source:
    what = f"SOURCE {spec}"
    builder = _guarded(what, "load_dataset_builder", spec, config_name, revision=revision, hub=True)
    names = dict.fromkeys([*(builder.info.splits or {}), *(builder.config.data_files or {})])
    name = _choose_split(what, names, split)
    dataset = _guarded(what, "load_dataset", spec, config_name, revision=revision, split=name, hub=True)
    # Resolved addresses hold the commit (hf://datasets/id@commit/file), so a moved branch is another source.
    files = sorted(str(file) for file in (builder.config.data_files or {}).get(name, []))
    identity = {"kind": "hub", "id": spec, "config": config_name, "split": name, "files": files}
    return Source(dataset.with_format("arrow"), False, identity, None)


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


def _choose_split(what: str, splits: Iterable[Any], split: str | None) -> str:
    names = [str(name) for name in splits]
    if split is None:
        split = "train" if "train" in names else names[0] if len(names) == 1 else None
    if split is None or split not in names:
        asked = "it has several splits" if split is None else f"it has no split {split}"
        raise SourceError(f"{what}: {asked}; choose with --split one of: {', '.join(names) or '(none found)'}")
    return split


def _identify(files: Sequence[Path], root: Path) -> dict[str, Any]:
    """Names, sizes and content hashes (xxh3-128): a moved copy is the same source, a changed one is not."""
    base = root.resolve()
    identities = []
    for file in sorted(files):
        digest = xxhash.xxh3_128()
        with open(file, "rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
        full = file.resolve()
        name = full.relative_to(base).as_posix() if full.is_relative_to(base) else full.name
        identities.append({"name": name, "bytes": full.stat().st_size, "xxh3_128": digest.hexdigest()})
    if len(identities) <= _LISTED_FILES:
        return {"files": identities}
    return {
        "num_files": len(identities),
        "bytes": sum(entry["bytes"] for entry in identities),
        "listing_sha256": canonical_hash(identities),
    }


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
