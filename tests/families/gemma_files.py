"""The tokenizer and the processor of :mod:`tests.families.gemma_like`: the embedded tokenizer with Gemma 3's marks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.families.gemma_like import FAMILY, SIDE
from vlmdata.preprocess.assets import EMBEDDED_TOKENIZER

#: Gemma 3's own template.
TEMPLATE = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}
                {{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\n'}}
{%- endif -%}
"""
_NAMED = {
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}


def write_tokenizer(folder: Path, template: str = TEMPLATE) -> str:
    """Writes the tokenizer's files; returns the folder."""
    folder.mkdir(parents=True)
    fields = json.loads((EMBEDDED_TOKENIZER / "tokenizer.json").read_text())
    texts = (*_NAMED.values(), "<start_of_turn>", "<end_of_turn>")
    first = fields["added_tokens"][0]
    fields["added_tokens"] = [
        first | {"id": first["id"] + number, "content": text, "special": True} for number, text in enumerate(texts)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "extra_special_tokens": {}, **_NAMED}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)
    return str(folder)


def processor(hf: Any) -> Any:
    """Returns transformers' processor of Gemma 3 for this tokenizer and family."""
    from transformers import Gemma3ImageProcessor, Gemma3Processor

    images = Gemma3ImageProcessor(
        size={"height": SIDE, "width": SIDE}, image_mean=list(FAMILY.image_mean), image_std=list(FAMILY.image_std)
    )
    tokens = (SIDE // FAMILY.factor) ** 2
    return Gemma3Processor(images, hf, chat_template=hf.chat_template, image_seq_length=tokens)
