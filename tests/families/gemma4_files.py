"""The tokenizer and the processor of Gemma 4: the embedded tokenizer with its marks and a template of its form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vlmdata.preprocess.assets import EMBEDDED_TOKENIZER

#: Writes turns, images, tools and reasoning as the published template does, with transformers' tag around what the
#: model says. What it leaves out: parameters of tools.
TEMPLATE = """
{%- macro spoken(text) -%}
    {%- set kept = namespace(text='') -%}
    {%- for piece in text.split('<channel|>') -%}
        {%- set kept.text = kept.text + piece.split('<|channel>')[0] -%}
    {%- endfor -%}
    {{- kept.text | trim -}}
{%- endmacro -%}
{%- macro value(given) -%}
    {%- if given is string -%}
        {{- '<|"|>' + given + '<|"|>' -}}
    {%- else -%}
        {{- given | tojson -}}
    {%- endif -%}
{%- endmacro -%}
{%- macro fields(given) -%}
    {%- for name, each in given | dictsort -%}
        {{- name + ':' + value(each) + ('' if loop.last else ',') -}}
    {%- endfor -%}
{%- endmacro -%}
{%- set rest = messages -%}
{{- bos_token -}}
{%- if enable_thinking or tools or messages[0].role == 'system' -%}
    {{- '<|turn>system\\n' -}}
    {%- if enable_thinking -%}
        {{- '<|think|>\\n' -}}
    {%- endif -%}
    {%- if messages[0].role == 'system' -%}
        {{- messages[0].content | trim -}}
        {%- set rest = messages[1:] -%}
    {%- endif -%}
    {%- for tool in tools or [] -%}
        {{- '<|tool>declaration:' + tool.function.name + '{description:' + value(tool.function.description) -}}
        {{- '}<tool|>' -}}
    {%- endfor -%}
    {{- '<turn|>\\n' -}}
{%- endif -%}
{%- set last = namespace(user=-1, role='') -%}
{%- for message in rest if message.role == 'user' -%}
    {%- set last.user = rest.index(message) -%}
{%- endfor -%}
{%- for message in rest -%}
{%- if message.role != 'tool' -%}
    {%- set role = 'model' if message.role == 'assistant' else message.role -%}
    {%- if not (role == 'model' and last.role == 'model') -%}
        {{- '<|turn>' + role + '\\n' -}}
    {%- endif -%}
    {%- set last.role = role -%}
    {%- generation -%}
    {%- if message.reasoning_content and message.tool_calls and loop.index0 > last.user -%}
        {{- '<|channel>thought\\n' + message.reasoning_content + '\\n<channel|>' -}}
    {%- endif -%}
    {%- for call in message.tool_calls or [] -%}
        {{- '<|tool_call>call:' + call.function.name + '{' + fields(call.function.arguments) + '}<tool_call|>' -}}
    {%- endfor -%}
    {%- endgeneration -%}
    {%- set after = namespace(role='', responses=0) -%}
    {%- for other in rest[loop.index:] -%}
        {%- if after.role -%}
        {%- elif other.role != 'tool' -%}
            {%- set after.role = other.role -%}
        {%- elif message.tool_calls -%}
            {%- set named = namespace(name=other.name or 'unknown', text='') -%}
            {%- for call in message.tool_calls if call.id == other.tool_call_id -%}
                {%- set named.name = call.function.name -%}
            {%- endfor -%}
            {%- for part in ([] if other.content is string else other.content) if part.type == 'text' -%}
                {%- set named.text = named.text + part.text -%}
            {%- endfor -%}
            {%- set response = value(other.content if other.content is string else named.text) -%}
            {{- '<|tool_response>response:' + named.name + '{value:' + response + '}<tool_response|>' -}}
            {%- for part in ([] if other.content is string else other.content) if part.type == 'image' -%}
                {{- '<|image|>' -}}
            {%- endfor -%}
            {%- set after.responses = after.responses + 1 -%}
        {%- endif -%}
    {%- endfor -%}
    {%- set words -%}
        {%- if message.content is string -%}
            {{- spoken(message.content) if role == 'model' else message.content | trim -}}
        {%- else -%}
            {%- for part in message.content -%}
                {%- if part.type == 'image' -%}
                    {{- '<|image|>' -}}
                {%- elif part.type == 'text' -%}
                    {{- spoken(part.text) if role == 'model' else part.text | trim -}}
                {%- endif -%}
            {%- endfor -%}
        {%- endif -%}
    {%- endset -%}
    {%- set ending -%}
        {%- if message.tool_calls and not after.responses -%}
            {{- '<|tool_response>' -}}
        {%- elif role == 'model' and after.role == 'assistant' -%}
        {%- elif not (after.responses and not words | trim and not after.role) -%}
            {{- '<turn|>\\n' -}}
        {%- endif -%}
    {%- endset -%}
    {%- if role == 'model' -%}
        {%- generation -%}
            {{- words + ending -}}
        {%- endgeneration -%}
    {%- else -%}
        {{- words + ending -}}
    {%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {%- if messages[-1].role == 'tool' -%}
        {{- '<|channel>thought\\n' if enable_thinking -}}
    {%- else -%}
        {{- '<|turn>model\\n' + ('' if enable_thinking else '<|channel>thought\\n<channel|>') -}}
    {%- endif -%}
{%- endif -%}
"""
#: An earlier revision: each message ends its turn, and the prompt of inference has no think block.
EARLIER = TEMPLATE[: TEMPLATE.index("    {%- if messages[-1].role == 'tool' -%}")]
EARLIER = EARLIER.replace("        {%- elif role == 'model' and after.role == 'assistant' -%}\n", "")
EARLIER = EARLIER.replace(" and not after.role) -%}", ") -%}")
EARLIER += "    {{- '' if messages[-1].role == 'tool' else '<|turn>model\\n' -}}\n{%- endif -%}\n"
_NAMED = {
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
}
_EXTRA = {
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "image_token": "<|image|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
    "audio_token": "<|audio|>",
}
_OTHERS = (
    *("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", "<|video|>", '<|"|>'),
    *("<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"),
)


def write_tokenizer(folder: Path, template: str = TEMPLATE) -> str:
    """Writes the tokenizer's files; returns the folder."""
    folder.mkdir(parents=True)
    fields = json.loads((EMBEDDED_TOKENIZER / "tokenizer.json").read_text())
    first = fields["added_tokens"][0]
    fields["added_tokens"] = [
        first | {"id": first["id"] + number, "content": text, "special": True}
        for number, text in enumerate((*_NAMED.values(), *_EXTRA.values(), *_OTHERS))
    ]
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "processor_class": "Gemma4Processor",
        "extra_special_tokens": _EXTRA,
        **_NAMED,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)
    return str(folder)


def processor(hf: Any, budget: int) -> Any:
    """Returns transformers' processor for this tokenizer and budget of tokens."""
    from transformers.models.gemma4 import (
        Gemma4AudioFeatureExtractor,
        Gemma4ImageProcessor,
        Gemma4Processor,
        Gemma4VideoProcessor,
    )

    return Gemma4Processor(
        Gemma4AudioFeatureExtractor(),
        Gemma4ImageProcessor(max_soft_tokens=budget),
        hf,
        Gemma4VideoProcessor(),
        chat_template=hf.chat_template,
    )
