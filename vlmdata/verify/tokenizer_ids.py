"""The audit of the manifest's tokenizer data: ids and named tokens against the dataset's tokenizer folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmdata.format.manifest import Manifest, TokenizerInfo
from vlmdata.format.schema import MANIFEST_NAME, TOKENIZER_DIR
from vlmdata.format.tokenizer_files import CONFIG_FILE, VOCABULARY_FILE
from vlmdata.verify.fault import Fault

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_END_OF_TEXT, _IM_START, _IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
#: For each id of the manifest, the token's usual text, and the setting that may name another one.
_ROLES = {
    "im_start": (_IM_START, None),
    "im_end": (_IM_END, None),
    "vision_start": ("<|vision_start|>", "vision_bos_token"),
    "vision_end": ("<|vision_end|>", "vision_eos_token"),
    "image": ("<|image_pad|>", "image_token"),
    "video": ("<|video_pad|>", "video_token"),
}


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
    for name, found, expected in _contradictions(tokenizer, config, manifest.tokenizer):
        yield Fault(MANIFEST_NAME, "tokenizer", f"tokenizer.{name} is {found!r}, but {TOKENIZER_DIR}/ has {expected!r}")


def _contradictions(
    tokenizer: Tokenizer, config: Mapping[str, Any], info: TokenizerInfo
) -> Iterator[tuple[str, Any, Any]]:
    if (size := tokenizer.get_vocab_size(with_added_tokens=True)) != info.vocab_size:
        yield "vocab_size", info.vocab_size, size
    for role, (usual, attribute) in _ROLES.items():
        # transformers takes the usual token if the setting is not one of its own attributes.
        texts = {usual, _named(config, attribute)} if attribute else {usual}
        ids = [tokenizer.token_to_id(each) for each in texts if each is not None]
        if (found := getattr(info, role)) not in ids:
            yield role, found, next((id for id in ids if id is not None), None)
    tokenizer.no_truncation()
    header = tuple(tokenizer.encode(f"{_IM_START}assistant\n", add_special_tokens=False).ids[1:])
    if header != info.assistant_header:
        yield "assistant_header", info.assistant_header, header
    for name, text in info.special_tokens.items():
        setting = _named(config, name)
        if setting is not None and text != setting:
            yield f"special_tokens.{name}", text, setting
        elif tokenizer.token_to_id(text) is None:
            yield f"special_tokens.{name}", text, None
    end = _named(config, "eos_token")
    pad = tokenizer.token_to_id(str(_named(config, "pad_token") or end))
    if pad is not None and pad != info.pad:
        yield "pad", info.pad, pad
    if info.end_of_text >= 0 and (expected := _end_of_text(tokenizer, end)) != info.end_of_text:
        yield "end_of_text", info.end_of_text, expected


def _end_of_text(tokenizer: Tokenizer, end: str | None) -> int | None:
    """The token that ends documents: the first of these that is flagged special, else the end of turns."""
    special = {each.content: id for id, each in tokenizer.get_added_tokens_decoder().items() if each.special}
    found = next((special[text] for text in (_END_OF_TEXT, end) if text in special), None)
    return tokenizer.token_to_id(_IM_END) if found is None else found


def _named(config: Mapping[str, Any], setting: str) -> str | None:
    """Returns the token's text in a setting, which may be an object with flags."""
    value = config.get(setting)
    value = value.get("content") if isinstance(value, Mapping) else value
    return value if isinstance(value, str) else None
