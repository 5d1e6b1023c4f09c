"""The audit of the manifest's tokenizer data: ids and named tokens against the dataset's tokenizer folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmdata.families import Family
from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import MANIFEST_NAME, TOKENIZER_DIR
from vlmdata.format.tokenizer_files import CONFIG_FILE, VOCABULARY_FILE
from vlmdata.format.tokenizer_info import TokenizerInfo, flat, special_ids
from vlmdata.verify.fault import Fault

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def tokenizer_info_faults(directory: Path, manifest: Manifest) -> Iterator[Fault]:
    """Yields a fault for each value of ``tokenizer`` in the manifest that the tokenizer folder contradicts.

    The caller has checked the files of the folder.
    """
    from tokenizers import Tokenizer  # loaders and servers need none

    folder = directory / TOKENIZER_DIR
    try:
        tokenizer = Tokenizer.from_file(str(folder / VOCABULARY_FILE))
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"{CONFIG_FILE} is not an object")
    except Exception as error:  # tokenizers raises bare Exception
        yield Fault(f"{TOKENIZER_DIR}/{VOCABULARY_FILE}", "tokenizer", f"cannot be read: {error}")
        return
    for name, found, expected in _contradictions(tokenizer, config, manifest.tokenizer, manifest.model_family):
        yield Fault(MANIFEST_NAME, "tokenizer", f"tokenizer.{name} is {found!r}, but {TOKENIZER_DIR}/ has {expected!r}")


def _contradictions(
    tokenizer: Tokenizer, config: Mapping[str, Any], info: TokenizerInfo, family: Family
) -> Iterator[tuple[str, Any, Any]]:
    if (size := tokenizer.get_vocab_size(with_added_tokens=True)) != info.vocab_size:
        yield "vocab_size", info.vocab_size, size
    tokenizer.no_truncation()
    # transformers takes the usual token if the setting is not one of its own attributes.
    found, eos = flat(asdict(info)), _named(config, "eos_token")
    usual = special_ids(tokenizer, family, lambda setting: eos if setting == "eos_token" else None)
    for place, expected in special_ids(tokenizer, family, partial(_named, config)).items():
        recorded = place != "end_of_text" or info.end_of_text >= 0
        if recorded and found[place] not in (expected, usual[place]):
            yield place, found[place], expected
    for name, text in info.special_tokens.items():
        setting = _named(config, name)
        if setting is not None and text != setting:
            yield f"special_tokens.{name}", text, setting
        elif tokenizer.token_to_id(text) is None:
            yield f"special_tokens.{name}", text, None
    pad = tokenizer.token_to_id(str(_named(config, "pad_token") or eos))
    if pad is not None and pad != info.pad:
        yield "pad", info.pad, pad


def _named(config: Mapping[str, Any], setting: str) -> str | None:
    """Returns the token's text in a setting, which may be an object with flags."""
    value = config.get(setting)
    value = value.get("content") if isinstance(value, Mapping) else value
    return value if isinstance(value, str) else None
