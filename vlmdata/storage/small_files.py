"""Checks the files of a dataset that are not shards against the manifest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import TOKENIZER_DIR
from vlmdata.format.tokenizer_files import tokenizer_file_names, tokenizer_findings

if TYPE_CHECKING:
    from vlmdata.storage import Store


def small_file_problems(store: Store, manifest: Manifest) -> Iterator[str]:
    """Yields what is wrong with index, ledger, list of image files and tokenizer folder, as parts of a sentence."""
    for name, expected in manifest.small_files.items():
        if not (found := store.sha256(name)):
            yield f"{name} is missing"
        elif found != expected:
            yield f"{name} has sha256 {found}, but the manifest says {expected}"
    with store.local(*(f"{TOKENIZER_DIR}/{name}" for name in tokenizer_file_names(manifest))) as folder:
        yield from (f"{file}: {message}" for file, _, message in tokenizer_findings(folder, manifest))
