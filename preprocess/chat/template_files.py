"""Chooses the chat template of a folder or hub id that ``AutoProcessor`` takes, with which models are served."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmdata.errors import SourceError

#: Name of a template among several.
_DEFAULT = "default"


@dataclass(frozen=True)
class ChosenTemplate:
    """The chat template of a tokenizer.

    Attributes:
        text: The template, or several by name, of which tools may choose one; None if there is none.
        file: The file that has it.
        unused: Other files with another template.
    """

    text: str | dict[str, str] | None = None
    file: str = ""
    unused: tuple[str, ...] = ()


def chosen_template(name: str, revision: str | None, of_tokenizer: str | dict[str, str] | None) -> ChosenTemplate:
    """Chooses the template in the order of ``AutoProcessor``.

    These are ``processor_config.json``, ``chat_template.json``, and ``chat_template.jinja`` with the folder
    ``additional_chat_templates``, of which a processor always takes the default. ``tokenizer_config.json`` is used if
    there is none of these.

    Args:
        name: The folder or hub id.
        revision: Its revision.
        of_tokenizer: What ``AutoTokenizer`` takes: the last two.

    Raises:
        SourceError: If ``AutoProcessor`` refuses the files.
    """
    config, legacy = read_json(name, "processor_config.json", revision), read_json(name, "chat_template.json", revision)
    jinja, others = _text(name, "chat_template.jinja", revision), _additional(name, revision)
    told = read_json(name, "tokenizer_config.json", revision).get("chat_template")
    by_file = {
        "processor_config.json": config.get("chat_template"),
        "chat_template.json": legacy.get("chat_template"),
        "chat_template.jinja": jinja,
        "tokenizer_config.json": told,
    }
    found = {file: text for file, text in by_file.items() if text}
    if "chat_template.json" not in found and _text(name, "chat_template.json", revision) is not None:
        raise SourceError(f'--tokenizer {name}: its chat_template.json is not of the form {{"chat_template": "…"}}')
    file = next(iter(found), "")
    chosen = of_tokenizer if file in ("", "chat_template.jinja", "tokenizer_config.json") else found[file]
    if others and "chat_template.json" in found:
        raise SourceError(
            f"--tokenizer {name}: it has both chat_template.json and {others[0]}, which AutoProcessor refuses. Replace "
            "chat_template.json by chat_template.jinja with the template as text."
        )
    if isinstance(chosen, dict) and (config or read_json(name, "preprocessor_config.json", revision)):
        if _DEFAULT not in chosen:
            raise SourceError(
                f"--tokenizer {name}: its chat templates are {', '.join(sorted(chosen))}, and AutoProcessor needs one "
                f"named {_DEFAULT}: chat_template.jinja."
            )
        chosen = chosen[_DEFAULT]
    unused = [other for other, text in found.items() if other != file and text != found[file]]
    return ChosenTemplate(chosen, file, tuple(unused))


def _additional(name: str, revision: str | None) -> list[str]:
    """Returns the files of additional templates."""
    from transformers.utils.hub import list_repo_templates

    folder = "additional_chat_templates"
    if Path(name).is_dir():
        return sorted(f"{folder}/{file.name}" for file in Path(name, folder).glob("*.jinja"))
    try:
        found = list_repo_templates(name, local_files_only=False, revision=revision)
    except Exception:  # none, or the hub is not available: loading the tokenizer reports that
        return []
    return sorted(f"{folder}/{each}" for each in found)


def read_json(tokenizer: str, file: str, revision: str | None) -> dict[str, Any]:
    """Reads a JSON file of a folder or hub id; empty if there is none."""
    try:
        values = json.loads(_text(tokenizer, file, revision) or "{}")
    except ValueError:  # loading the tokenizer reports it
        return {}
    return values if isinstance(values, dict) else {}


def _text(tokenizer: str, file: str, revision: str | None) -> str | None:
    from transformers.utils.hub import cached_file

    try:
        found = cached_file(
            tokenizer,
            file,
            revision=revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )
        return Path(found).read_text(encoding="utf-8") if found else None
    except (OSError, ValueError):  # loading the tokenizer reports if it is not available
        return None
