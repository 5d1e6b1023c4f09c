"""Tokenizers in the forms that other people's have, made from the embedded one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vlmdata.preprocess.assets import EMBEDDED_TOKENIZER

#: A short ChatML template with images.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
)
#: The same for texts alone; images are printed as what they are in Python.
TEXT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"

RELIED = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")

Edit = Callable[[dict[str, Any]], object]


def write_tokenizer(
    folder: Path, *, backend: Edit | None = None, config: Mapping[str, Any] | None = None, template: str = TEMPLATE
) -> str:
    """Writes a variant of the embedded tokenizer.

    Args:
        folder: Where to.
        backend: Edits the content of tokenizer.json.
        config: Values of tokenizer_config.json; None removes a key.
        template: The chat template.
    """
    folder.mkdir(parents=True)
    fields = json.loads((EMBEDDED_TOKENIZER / "tokenizer.json").read_text())
    if backend is not None:
        backend(fields)
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    settings = json.loads((EMBEDDED_TOKENIZER / "tokenizer_config.json").read_text()) | dict(config or {})
    settings = {name: value for name, value in settings.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(template)
    return str(folder)


def normaliser(kind: str, **options: Any) -> Edit:
    """Sets the normaliser."""
    return lambda fields: fields.update(normalizer={"type": kind, **options})


def flag_tokens(**flags: bool) -> Edit:
    """Sets flags of the added tokens that the code relies on."""

    def edit(fields: dict[str, Any]) -> None:
        for token in fields["added_tokens"]:
            if token["content"] in RELIED:
                token.update(flags)

    return edit


def ordinary_token(text: str) -> Edit:
    """Makes an added token an ordinary entry of the vocabulary, in place of the last one."""

    def edit(fields: dict[str, Any]) -> None:
        fields["added_tokens"] = [token for token in fields["added_tokens"] if token["content"] != text]
        vocabulary, merges = fields["model"]["vocab"], fields["model"]["merges"]
        *_, last = sorted(vocabulary, key=vocabulary.get)
        assert "".join(merges.pop()) == last
        vocabulary[text] = vocabulary.pop(last)
        for id, token in enumerate(fields["added_tokens"], start=len(vocabulary)):
            token["id"] = id

    return edit


def together(*edits: Edit) -> Edit:
    """One edit after the other."""
    return lambda fields: [edit(fields) for edit in edits]


#: tokenizer_config.json without the names that would make transformers flag the relied-on tokens special.
UNNAMED = {
    "additional_special_tokens": None,
    "image_token": None,
    "video_token": None,
    "vision_bos_token": None,
    "vision_eos_token": None,
    "eos_token": "<|endoftext|>",
}
