"""Files in the folder of a dataset that the manifest does not name."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import MANIFEST_NAME, PROGRESS_DIR, TOKENIZER_DIR
from vlmdata.format.tokenizer_files import (
    STRAY,
    added_tokenizer_files,
    files_below,
    is_hidden,
    stray_tokenizer_file,
    tokenizer_file_names,
)
from vlmdata.verify.fault import Fault

_IN_TOKENIZER = f"{TOKENIZER_DIR}/"


def listed(directory: Path) -> list[str]:
    """Returns the names in a dataset's folder, and the paths of the files in its tokenizer folder."""
    return [*os.listdir(directory), *(f"{_IN_TOKENIZER}{name}" for name in files_below(directory / TOKENIZER_DIR))]


def stray_files(names: Iterable[str], manifest: Manifest) -> Iterator[Fault]:
    """Yields a fault for each file that a reader could take for a part of the dataset.

    These are shards, which a reader of plain tars would read, and files that change the tokenizer.
    """
    names = sorted(names)
    shards = {shard.name for shard in manifest.shards}
    for name in names:
        if name.startswith("shard-") and name not in shards:
            yield Fault(name, STRAY, "a shard that is not in the manifest")
    inner = [name.removeprefix(_IN_TOKENIZER) for name in names if name.startswith(_IN_TOKENIZER)]
    yield from (Fault(*stray_tokenizer_file(name)) for name in added_tokenizer_files(inner, manifest))


def foreign_files(names: Iterable[str], manifest: Manifest) -> tuple[str, ...]:
    """Returns the files and folders that are no part of the dataset and harm none of its readers, sorted."""
    own = {MANIFEST_NAME, *manifest.small_files, TOKENIZER_DIR, PROGRESS_DIR}
    own |= {shard.name for shard in manifest.shards}
    own |= {f"{_IN_TOKENIZER}{name}" for name in tokenizer_file_names(manifest)}
    names = list(names)
    faulty = {fault.file for fault in stray_files(names, manifest)}
    return tuple(
        name
        for name in sorted(names)
        if name not in own and name not in faulty and (is_hidden(name) or not name.startswith(_IN_TOKENIZER))
    )
