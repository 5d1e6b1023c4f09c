"""Opening a source by what the user typed: the demo, a file, a folder, a saved dataset, or a hub id."""

from __future__ import annotations

import dataclasses
import glob
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from preprocess.sources import arrow
from preprocess.sources.byte_files import byte_files
from preprocess.sources.delimited import DelimitedFile
from preprocess.sources.folder import FolderContent
from preprocess.sources.identity import identify
from preprocess.sources.json_lines import JsonLinesFile
from preprocess.sources.kinds import Kind, kind_of, the_kind
from preprocess.sources.records import RecordFile, RecordRows
from preprocess.sources.rows import Source
from preprocess.sources.webdataset import TarFile
from vlmdata.errors import SourceError

DEMO = "demo"
DEMO_ROWS = 64
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


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
    elif _HUB_ID.fullmatch(spec) and kind_of(path) is None:
        source = arrow.open_hub(spec, split, config_name, revision)
    else:
        raise SourceError(f"SOURCE {spec}: no such file or folder, and not a hub dataset id either")
    if source.num_rows == 0:
        raise SourceError(f"SOURCE {spec}: it has no rows")
    numbers = source.numbers if limit is None else source.numbers[:limit]
    return dataclasses.replace(source, numbers=numbers, identity={**source.identity, "rows": len(numbers)})


def _demo(layout: str, rows: int, on_row: Callable[[int], None] | None) -> Source:
    from preprocess.demo import DEMO_VERSION, ensure_demo_dataset

    if layout not in ("cord_v2", "chat"):
        raise SourceError(f"SOURCE demo: it has rows for the recipes cord_v2 and chat, not for {layout}")
    directory = ensure_demo_dataset(layout, rows, progress=on_row)  # type: ignore[arg-type]
    drawn = _local(directory, "train")
    # What was drawn is known by its version; where it is cached says nothing.
    identity = {"kind": "demo", "layout": layout, "version": DEMO_VERSION, "files": drawn.identity["files"]}
    return dataclasses.replace(drawn, identity=identity, image_root=None)


def _local(path: Path, split: str | None, config_name: str | None = None) -> Source:
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        return arrow.open_saved(path, split)
    if path.is_dir():
        return _folder(path, split, config_name)
    # A name that exists is meant literally, brackets and all.
    matched = [str(path)] if path.exists() else sorted(glob.glob(str(path), recursive=True))
    files = [Path(name) for name in matched if Path(name).is_file()]
    if not files:
        raise SourceError(f"SOURCE {path}: no file matches")
    kind = the_kind(f"SOURCE {path}", files)
    if split not in (None, "train"):
        raise SourceError(
            f"SOURCE {files[0]}: a data file has no splits, so --split {split} names nothing; leave it out. "
            "(--holdout 0.02 holds out a share of its rows.)"
        )
    return _files(kind, files, None, files[0].parent)


def _folder(folder: Path, split: str | None, config_name: str | None) -> Source:
    content = FolderContent.look(folder)
    if not content.is_for_datasets and config_name is None:
        kind, name, files = content.choose(split)
        return _files(kind, files, name, folder)
    if glob.has_magic(str(folder.resolve())):
        raise SourceError(
            f"SOURCE {folder}: `datasets` takes a folder whose path holds *, ? or [ for a pattern; "
            "rename it, link to it by another name, or give its files"
        )
    return arrow.open_folder(folder, split, config_name)


def _files(kind: Kind, files: Sequence[Path], split: str | None, root: Path) -> Source:
    """Opens files of one kind, which are a split of the folder ``root`` or were named one by one."""
    records: list[RecordFile]
    if kind is Kind.JSON_LINES:
        records = [JsonLinesFile(file) for file in byte_files(files)]
    elif kind is Kind.DELIMITED:
        records = [DelimitedFile.read_header(file) for file in byte_files(files)]
    elif kind is Kind.TAR:
        records = [TarFile(file) for file in byte_files(files)]
    else:
        return arrow.open_files(kind.value, files, split, root)
    rows = RecordRows.scan(records)
    identity = {"kind": "files", **({"split": split} if split else {}), **identify(files, root)}
    return Source.whole(rows, identity, str(root))
