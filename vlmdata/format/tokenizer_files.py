"""Checks that a dataset's tokenizer folder is unchanged: no file changed, removed or added."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from vlmdata.errors import DatasetFormatError
from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import TOKENIZER_DIR

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCABULARY_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
_TEMPLATE_FILE = "chat_template.jinja"
_MORE_TEMPLATES = "additional_chat_templates"
#: Check of a file that the manifest does not name.
STRAY = "stray"

Finding = tuple[str, str, str]
"""(file within the dataset, check, message)."""


def fingerprint_of(tokenizer: Tokenizer) -> str:
    """Returns the sha256 of a tokenizer: vocabulary, merges, added tokens, normaliser and pre-tokenizer."""
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def hash_tokenizer_files(folder: Path) -> dict[str, str]:
    """Returns the sha256 of each file in a tokenizer folder, by relative path."""
    return {name: _sha256(folder / name) for name in files_below(folder)}


def recorded_tokenizer_files(directory: Path, manifest: Manifest) -> Mapping[str, str]:
    """Returns the sha256 of each file of a dataset's tokenizer, by its name in the folder.

    A manifest of format 1.0 does not have them; then they are those of the files that stand there.

    Raises:
        DatasetFormatError: If one of the latter is a link: nothing tells whether its content belongs to the dataset.
    """
    if manifest.tokenizer_files:
        return manifest.tokenizer_files
    folder = directory / TOKENIZER_DIR
    names = [name for name in files_below(folder) if not is_hidden(name)]
    if links := [name for name in names if (folder / name).is_symlink()]:
        raise DatasetFormatError(f"{folder}: {', '.join(links)} is a link. Replace it by the file.")
    return {name: _sha256(folder / name) for name in names}


def tokenizer_file_names(manifest: Manifest) -> tuple[str, ...]:
    """Returns the files of the tokenizer folder. A manifest of format 1.0 does not list them."""
    return tuple(manifest.tokenizer_files) or (VOCABULARY_FILE, CONFIG_FILE, _TEMPLATE_FILE)


def added_tokenizer_files(names: Iterable[str], manifest: Manifest) -> list[str]:
    """Returns the files of a tokenizer folder that its writer did not make, sorted.

    Any of them may change ids: transformers reads many names, such as ``added_tokens.json``. It reads no hidden files.
    """
    known = set(tokenizer_file_names(manifest))
    return sorted(
        name
        for name in names
        if name not in known
        and not is_hidden(name)
        and (manifest.tokenizer_files or not name.startswith(f"{_MORE_TEMPLATES}/"))
    )


def is_hidden(name: str) -> bool:
    """True for a file that systems hide, or in such a folder: ``.DS_Store``."""
    return any(part.startswith(".") for part in name.split("/"))


def files_below(folder: Path) -> list[str]:
    """Returns the paths of all files in a folder, relative to it, sorted; none if the folder does not exist."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def tokenizer_findings(directory: Path, manifest: Manifest) -> Iterator[Finding]:
    """Yields all faults in the tokenizer folder of a dataset.

    Compares the files with the hashes in the manifest. A manifest of format 1.0 has none; then this function compares
    the vocabulary with the tokenizer's fingerprint, the template with its hash and the pad token with its id. Added
    files are found too; their check is ``STRAY``.
    """
    folder = directory / TOKENIZER_DIR
    for name in tokenizer_file_names(manifest):
        if not (folder / name).is_file():
            yield f"{TOKENIZER_DIR}/{name}", "missing", "file not found"
            continue
        problem = _problem(folder, name, manifest)
        if problem:
            yield f"{TOKENIZER_DIR}/{name}", "tokenizer", problem
    for name in added_tokenizer_files(files_below(folder), manifest):
        yield stray_tokenizer_file(name)


def stray_tokenizer_file(name: str) -> Finding:
    """The finding of a file that was added to the tokenizer folder."""
    return f"{TOKENIZER_DIR}/{name}", STRAY, "a file that is not in the manifest; with it, the tokenizer may be another"


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
        if (folder / _MORE_TEMPLATES).is_dir():
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
