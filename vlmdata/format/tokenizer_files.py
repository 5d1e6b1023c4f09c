"""Checks that a dataset's tokenizer folder is unchanged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import TOKENIZER_DIR

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCABULARY_FILE = "tokenizer.json"
_CONFIG_FILE = "tokenizer_config.json"
_TEMPLATE_FILE = "chat_template.jinja"

Finding = tuple[str, str, str]
"""(file within the dataset, check, message)."""


def fingerprint_of(tokenizer: Tokenizer) -> str:
    """Returns the sha256 of a tokenizer: vocabulary, merges, added tokens, normaliser and pre-tokenizer."""
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def hash_tokenizer_files(folder: Path) -> dict[str, str]:
    """Returns the sha256 of each file in a tokenizer folder, by relative path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): _sha256(path) for path in files}


def tokenizer_file_names(manifest: Manifest) -> tuple[str, ...]:
    """Returns the files of the tokenizer folder. A manifest of format 1.0 does not list them."""
    return tuple(manifest.tokenizer_files) or (VOCABULARY_FILE, _CONFIG_FILE, _TEMPLATE_FILE)


def tokenizer_findings(directory: Path, manifest: Manifest) -> Iterator[Finding]:
    """Yields all faults in the tokenizer folder of a dataset.

    Compares the files with the hashes in the manifest. A manifest of format 1.0 has none; then this function compares
    the vocabulary with the tokenizer's fingerprint, the template with its hash and the pad token with its id.
    """
    folder = directory / TOKENIZER_DIR
    for name in tokenizer_file_names(manifest):
        if not (folder / name).is_file():
            yield f"{TOKENIZER_DIR}/{name}", "missing", "file not found"
            continue
        problem = _problem(folder, name, manifest)
        if problem:
            yield f"{TOKENIZER_DIR}/{name}", "tokenizer", problem


def vocabulary_problem(directory: Path, manifest: Manifest) -> str:
    """Describes the fault in the file that defines token ids; empty if there is none.

    Raises:
        OSError: If the file is missing or cannot be read.
    """
    return _problem(directory / TOKENIZER_DIR, VOCABULARY_FILE, manifest)


def _problem(folder: Path, name: str, manifest: Manifest) -> str:
    expected = manifest.tokenizer_files.get(name)
    if expected is not None:
        found = _sha256(folder / name)
        return "" if found == expected else f"sha256 {found}, but the manifest says {expected}"
    info = manifest.tokenizer
    if name == _TEMPLATE_FILE:
        if (folder / "additional_chat_templates").is_dir():
            return ""  # the hash covers all templates together
        found = _sha256(folder / name)
        return "" if found == info.chat_template else f"sha256 {found}, but the manifest says {info.chat_template}"
    from tokenizers import Tokenizer  # loaders and servers need none

    try:
        tokenizer = Tokenizer.from_file(str(folder / VOCABULARY_FILE))
        if name == VOCABULARY_FILE:
            found = fingerprint_of(tokenizer)
            return "" if found == info.fingerprint else f"fingerprint {found}, but the manifest says {info.fingerprint}"
        config = json.loads((folder / name).read_text(encoding="utf-8"))
        pad = config.get("pad_token") or config.get("eos_token")
        pad = pad.get("content") if isinstance(pad, dict) else pad
        found_pad = tokenizer.token_to_id(str(pad))
        return (
            "" if found_pad == info.pad else f"the pad token {pad!r} has id {found_pad}, the manifest says {info.pad}"
        )
    except Exception as error:  # tokenizers raises bare Exception
        return f"cannot be read: {error}"


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
