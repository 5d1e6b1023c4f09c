"""Opens a source by the user's input: the demo, a file, a folder, a URL, a saved dataset, or a hub id."""

from __future__ import annotations

import dataclasses
import glob
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from vlmdata.errors import SourceError
from vlmdata.format.manifest import canonical_hash
from vlmdata.locations import is_url
from vlmdata.preprocess.sources import datasets_library
from vlmdata.preprocess.sources.data_files import (
    DataFile,
    at_addresses,
    is_pattern,
    is_remote_folder,
    list_remote,
    matching,
    parent,
    relative_name,
    without_query,
)
from vlmdata.preprocess.sources.datasets_library import DescribedFolder, HubDataset
from vlmdata.preprocess.sources.folder import FolderContent
from vlmdata.preprocess.sources.identity import LISTED_FILES, METADATA, identify, mark_of
from vlmdata.preprocess.sources.json_file import AS_TEXT, JsonFile
from vlmdata.preprocess.sources.reader import Formats, Reader
from vlmdata.preprocess.sources.records import JsonLinesFile
from vlmdata.preprocess.sources.rows import FileRows, Source
from vlmdata.preprocess.sources.tables import TableFile, TableRows

DEMO = "demo"
DEMO_ROWS = 64
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
#: Files that ``datasets`` would read through Arrow, which guesses types: ``"2024-01-01"`` would be a time, 5 be 5.0.
_JSON = (JsonFile, JsonLinesFile)


def open_source(
    spec: str,
    *,
    recipe: str = "cord_v2",
    split: str | None = None,
    config_name: str | None = None,
    revision: str | None = None,
    limit: int | None = None,
    hash_source: bool = False,
    image_root: str | None = None,
    reader: str | None = None,
    drawn: Callable[[int], None] | None = None,
) -> Source:
    """Opens a source of rows.

    ``spec`` is ``demo``, a path (file, folder, glob, or ``save_to_disk`` folder), a URL of a file, pattern or folder,
    or a hub dataset id, with a configuration (subset) and a revision (branch, tag or commit). The default split is
    ``train``, or the only one. Rows of the demo are those of ``recipe``, and ``drawn`` is called with the
    number drawn so far. ``limit`` is a number of first rows. With ``hash_source``, all files are identified by their
    bytes. Image paths are relative to ``image_root``, a folder or URL, by default the source's folder. ``reader`` names
    what reads the files: only those with its endings are data files then. By default, the built-in readers do.

    Raises:
        SourceError: If it cannot be opened; the message has the remedy.
    """
    if limit is not None and limit < 1:
        raise SourceError(f"--limit {limit}: it must be at least 1")
    if reader is not None and (config_name is not None or revision is not None):
        raise SourceError(f"--reader {reader}: it reads files, which have no --subset and no --revision. Omit them.")
    formats = Formats.of(reader)
    if spec == DEMO:
        source = _demo(recipe, limit or DEMO_ROWS, drawn)
    elif is_url(spec):
        source = _remote(spec, split, hash_source, formats)
    elif (path := Path(spec)).exists() or glob.has_magic(spec):
        source = _local(path, split, config_name, hash_source, formats, image_root)
    elif _HUB_ID.fullmatch(spec) and formats.reader_of(spec) is None and not _is_in_folder(path):
        if reader is not None:
            raise SourceError(
                f"--reader {reader}: datasets of the hub are read by what the hub says of their files. Give the files: "
                f"'hf://datasets/{spec}/**'."
            )
        source = _hub(HubDataset.find(spec, split, config_name, revision), formats)
    else:
        raise SourceError(f"SOURCE {spec}: no such file or folder{_why_not_asked(spec, path)}")
    if source.num_rows == 0:
        raise SourceError(f"SOURCE {spec}: it has no rows")
    numbers = source.numbers if limit is None else source.numbers[:limit]
    return dataclasses.replace(source, numbers=numbers, identity={**source.identity, "rows": len(numbers)})


def _is_in_folder(path: Path) -> bool:
    """Returns whether a path that does not exist names a folder that does: it is mistyped, not the id of a dataset."""
    return len(path.parts) > 1 and path.parent.is_dir()


def _why_not_asked(spec: str, path: Path) -> str:
    if not (_is_in_folder(path) and _HUB_ID.fullmatch(spec)):
        return ", and not a hub dataset id either"
    return (
        f" in the folder {path.parent}. Correct the name; if a dataset of the hub is meant, start the command where "
        f"there is no folder {path.parent}."
    )


def _demo(recipe: str, rows: int, on_row: Callable[[int], None] | None) -> Source:
    from vlmdata.preprocess.demo import DEMO_VERSION, ensure_demo_dataset

    if recipe not in ("cord_v2", "chat"):
        raise SourceError(f"SOURCE demo: it has rows for the recipes cord_v2 and chat, not for {recipe}")
    directory = ensure_demo_dataset(recipe, rows, progress=on_row)  # type: ignore[arg-type]
    # The drawn rows are identified by content, not by the cache folder.
    drawn = _local(directory, "train", None, True, Formats.of(None))
    identity = {"kind": "demo", "layout": recipe, "version": DEMO_VERSION, "files": drawn.identity["files"]}
    return dataclasses.replace(drawn, identity=identity, image_root=None)


def _local(
    path: Path,
    split: str | None,
    config_name: str | None,
    hash_source: bool,
    formats: Formats,
    image_root: str | None = None,
) -> Source:
    if not formats.are_given and ((path / "dataset_dict.json").exists() or (path / "state.json").exists()):
        return datasets_library.open_saved(path, split)
    if path.is_dir():
        return _folder(path, split, config_name, hash_source, formats, image_root)
    files = matching(str(path))
    return _named_files(str(path), files, split, hash_source, formats)


def _remote(url: str, split: str | None, hash_source: bool, formats: Formats) -> Source:
    if is_pattern(url) or formats.reader_of(without_query(url)) is not None or not is_remote_folder(url):
        return _named_files(url, matching(url), split, hash_source, formats)
    listing = list_remote(url.rstrip("/"))
    content = FolderContent.look_remote(listing, formats)
    if content.is_for_datasets and not formats.are_given:
        raise SourceError(
            f"SOURCE {url}: an image folder, or one whose dataset card names its files, is read only on disk. Give a "
            "pattern of its files, or download it."
        )
    reader, name, names = content.choose(split)
    files = [listing.files[name] for name in names]
    return _files(reader, files, name, listing.root, hash_source, formats.identity)


def _named_files(
    spec: str, files: Sequence[DataFile], split: str | None, hash_source: bool, formats: Formats
) -> Source:
    """Opens files that the user gave individually or by a pattern."""
    reader = formats.require_common(f"SOURCE {spec}", [file.file_name for file in files])
    if split not in (None, "train"):
        raise SourceError(
            f"SOURCE {files[0].place}: a data file has no splits, so --split {split} names nothing; leave it out. "
            "(--holdout 0.02 holds out a share of its rows.)"
        )
    return _files(reader, files, None, parent(files[0].place), hash_source, formats.identity)


def _folder(
    folder: Path,
    split: str | None,
    config_name: str | None,
    hash_source: bool,
    formats: Formats,
    image_root: str | None,
) -> Source:
    content = FolderContent.look(folder, formats)
    if formats.are_given or (not content.is_for_datasets and config_name is None):
        reader, name, names = content.choose(split)
        files = [DataFile.local(folder / each) for each in names]
        return _files(reader, files, name, str(folder), hash_source, formats.identity)
    if glob.has_magic(str(folder.resolve())):
        raise SourceError(
            f"SOURCE {folder}: `datasets` takes a folder whose path holds *, ? or [ for a pattern; "
            "rename it, link to it by another name, or give its files"
        )
    described = DescribedFolder.find(folder, split, config_name)
    common = formats.common(map(str, described.files))
    if common in _JSON and described.reads_all:
        files = [DataFile.local(file) for file in described.files]
        return _files(common, files, described.split, str(folder), hash_source, AS_TEXT)
    return described.open(image_root)


def _hub(dataset: HubDataset, formats: Formats) -> Source:
    """Opens a hub dataset: Parquet, Arrow and JSON files in place, others through ``datasets``."""
    reader = formats.common(dataset.files)
    if reader is None:
        return dataset.open()
    if issubclass(reader, TableFile):
        rows, _ = TableRows.count(reader, at_addresses(dataset.files), dataset.features)
        places = FileRows([relative_name(file, "") for file in dataset.files], rows.file_starts)
        return dataclasses.replace(Source.whole(rows, dataset.identity, None), is_remote=True, files=places)
    if reader in _JSON and dataset.reads_all:
        source = _files(reader, at_addresses(dataset.files), None, "", False, AS_TEXT)
        return dataclasses.replace(source, identity={**dataset.identity, **AS_TEXT}, image_root=None)
    return dataset.open()


def _files(
    reader: type[Reader],
    files: Sequence[DataFile],
    split: str | None,
    root: str,
    hash_source: bool,
    own: Mapping[str, str],
) -> Source:
    """Opens files of one kind: a split of the folder ``root``, or files given individually.

    ``own`` is what their identity has besides the files and what their reader says.
    """
    found = reader.read(files, own.get("reader_source", ""))
    per_file = zip(files, found.contents, found.metadata, strict=True)
    marks = [mark_of(*each, hash_source) for each in per_file]
    names = [relative_name(file.place, root) for file in files]
    known = identify([(name, file.size, mark) for name, file, mark in zip(names, files, marks, strict=True)])
    times = {
        name: file.version or ""
        for name, file, mark in zip(names, files, marks, strict=True)
        if not file.is_remote and mark.kind == METADATA
    }
    if len(times) > LISTED_FILES:
        times = {"all": canonical_hash(times)}
    identity = {"kind": "files", **({"split": split} if split else {}), **reader.identity, **own, **known}
    source = Source.whole(found.rows, identity, root, times)
    return dataclasses.replace(source, is_remote=files[0].is_remote, files=FileRows(names, found.rows.file_starts))
