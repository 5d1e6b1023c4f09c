"""The tokenizer and the processor of InternVL3.5: the embedded tokenizer with its marks and a template of its form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.families.reference import internvl_images
from vlmdata.preprocess.assets import EMBEDDED_TOKENIZER

#: Writes what the published template does: ChatML, each image as a placeholder on a line of its own.
TEMPLATE = """
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}
            {{- message.content if message.content is string else message.content | map(attribute='text') | join -}}
            {{- '<|im_end|>\\n' -}}
        {%- endgeneration -%}
    {%- elif message.content is string -%}
        {{- message.content + '<|im_end|>\\n' -}}
    {%- else -%}
        {%- for part in message.content -%}
            {%- if part.type == 'image' -%}
                {{- '<IMG_CONTEXT>\\n' -}}
            {%- elif part.type == 'video' -%}
                {{- '<video>\\n' -}}
            {%- elif part.type == 'text' -%}
                {{- part.text -}}
            {%- endif -%}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
_NAMED = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
_OTHERS = ("<quad>", "</quad>", "<ref>", "</ref>", "<box>", "</box>")


def write_tokenizer(folder: Path, template: str = TEMPLATE) -> str:
    """Writes the tokenizer's files; returns the folder."""
    folder.mkdir(parents=True)
    fields = json.loads((EMBEDDED_TOKENIZER / "tokenizer.json").read_text())
    last = fields["added_tokens"][-1]
    fields["added_tokens"] += [
        last | {"id": last["id"] + number, "content": text, "special": True}
        for number, text in enumerate((*_NAMED.values(), *_OTHERS), start=1)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "processor_class": "InternVLProcessor",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "extra_special_tokens": _NAMED,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)
    return str(folder)


def processor(hf: Any, max_tiles: int) -> Any:
    """Returns transformers' processor for this tokenizer."""
    from transformers.models.internvl import InternVLProcessor, InternVLVideoProcessor

    return InternVLProcessor(internvl_images(max_tiles), hf, InternVLVideoProcessor(), chat_template=hf.chat_template)
