"""Checks the files of a dataset that are not shards against the manifest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import IMAGE_FILES, IMAGE_FILES_NAME, INDEX_NAME, LEDGER_NAME, TOKENIZER_DIR
from vlmdata.format.tokenizer_files import tokenizer_file_names, tokenizer_findings

if TYPE_CHECKING:
    from vlmdata.storage import Store


def small_file_problems(store: Store, manifest: Manifest) -> Iterator[str]:
    """Yields what is wrong with index, ledger, list of image files and tokenizer folder, as parts of a sentence."""
    hashes = {INDEX_NAME: manifest.index_sha256, LEDGER_NAME: manifest.ledger_sha256}
    if IMAGE_FILES in manifest.source:
        hashes[IMAGE_FILES_NAME] = manifest.source[IMAGE_FILES]["sha256"]
    for name, expected in hashes.items():
        if not (found := store.sha256(name)):
            yield f"{name} is missing"
        elif found != expected:
            yield f"{name} has sha256 {found}, but the manifest says {expected}"
    with store.local(*(f"{TOKENIZER_DIR}/{name}" for name in tokenizer_file_names(manifest))) as folder:
        yield from (f"{file}: {message}" for file, _, message in tokenizer_findings(folder, manifest))
