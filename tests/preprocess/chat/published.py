"""Chat templates that do what the published ones of each family do, in words of their own.

The tag ``{% generation %}`` is around what the model says, as in the templates with which TRL trains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.families import gemma4_files, internvl_files
from tests.preprocess.chat import unusual
from tests.preprocess.chat.later_templates import EMBEDDED, LATER, changed

#: What the templates of Qwen3-VL have in common. Content is never trimmed; calls are JSON.
_PLAIN = """
{%- macro written(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- else -%}
        {%- for part in content or [] -%}
            {%- if part.type == "image" -%}
                {{- "<|vision_start|><|image_pad|><|vision_end|>" -}}
            {%- elif part.type == "video" -%}
                {{- "<|vision_start|><|video_pad|><|vision_end|>" -}}
            {%- elif "text" in part -%}
                {{- part.text -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- macro called(calls, text) -%}
    {%- for call in calls or [] -%}
        {{- "\\n" if text or not loop.first -}}
        {{- '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' ~ call.function.arguments | tojson -}}
        {{- "}\\n</tool_call>" -}}
    {%- endfor -%}
{%- endmacro -%}
{%- if tools -%}
    {{- "<|im_start|>system\\n" -}}
    {%- if messages[0].role == "system" -%}
        {{- written(messages[0].content) ~ "\\n\\n" -}}
    {%- endif -%}
    {{- "Tools:" -}}
    {%- for tool in tools -%}
        {{- "\\n" ~ tool | tojson -}}
    {%- endfor -%}
    {{- "<|im_end|>\\n" -}}
{%- elif messages[0].role == "system" -%}
    {{- "<|im_start|>system\\n" ~ written(messages[0].content) ~ "<|im_end|>\\n" -}}
{%- endif -%}
{%- set last = namespace(query=-1) -%}
{%- for message in messages if message.role == "user" -%}
    {%- set last.query = messages.index(message) -%}
{%- endfor -%}
{%- for message in messages -%}
    {%- set text = written(message.content) -%}
    {%- if message.role == "user" -%}
        {{- "<|im_start|>user\\n" ~ text ~ "<|im_end|>\\n" -}}
    {%- elif message.role == "assistant" -%}
        {{- "<|im_start|>assistant\\n" -}}
        {%- generation -%}
        {#- think -#}
        {{- text ~ called(message.tool_calls, text) ~ "<|im_end|>\\n" -}}
        {%- endgeneration -%}
    {%- elif message.role == "tool" -%}
        {{- "<|im_start|>user" if loop.first or loop.previtem.role != "tool" -}}
        {{- "\\n<tool_response>\\n" ~ text ~ "\\n</tool_response>" -}}
        {{- "<|im_end|>\\n" if loop.last or loop.nextitem.role != "tool" -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- "<|im_start|>assistant\\n" -}}
{%- endif -%}
"""
_THINK = """
        {%- set reasoning = message.reasoning_content if message.reasoning_content is string else "" -%}
        {%- if message.reasoning_content is not string and "</think>" in text -%}
            {%- set reasoning = text.split("</think>")[0].rstrip("\\n").split("<think>")[-1].lstrip("\\n") -%}
            {%- set text = text.split("</think>")[-1].lstrip("\\n") -%}
        {%- endif -%}
        {%- if loop.index0 > last.query and (loop.last or reasoning) -%}
            {{- "<think>\\n" ~ reasoning.strip("\\n") ~ "\\n</think>\\n\\n" -}}
            {%- set text = text.lstrip("\\n") -%}
        {%- endif -%}
"""
_PROMPT = '{%- if add_generation_prompt -%}\n    {{- "<|im_start|>assistant\\n'
_THINKING = changed(_PLAIN, ("        {#- think -#}\n", _THINK), (_PROMPT, _PROMPT + "<think>\\n"))
_QWEN2_5 = """
{%- if messages[0].role != "system" -%}
    {{- "<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n" -}}
{%- endif -%}
{%- for message in messages -%}
    {{- "<|im_start|>" ~ message.role ~ "\\n" -}}
    {%- if message.role == "assistant" -%}
        {%- generation -%}
        {{- message.content if message.content is string else message.content | map(attribute="text") | join -}}
        {{- "<|im_end|>\\n" -}}
        {%- endgeneration -%}
    {%- else -%}
        {%- for part in ([{"text": message.content}] if message.content is string else message.content) -%}
            {%- if part.type in ["image", "video"] -%}
                {{- "<|vision_start|><|" ~ part.type ~ "_pad|><|vision_end|>" -}}
            {%- else -%}
                {{- part.text -}}
            {%- endif -%}
        {%- endfor -%}
        {{- "<|im_end|>\\n" -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- "<|im_start|>assistant\\n" -}}
{%- endif -%}
"""
_GENERATED = (
    ('    {{- "<|im_start|>assistant\\n" -}}\n', '    {{- "<|im_start|>assistant\\n" -}}\n    {%- generation -%}\n'),
    (
        '      {{- render_calls(message.tool_calls, text) -}}\n    {%- endif -%}\n    {{- "<|im_end|>\\n" -}}\n',
        '      {{- render_calls(message.tool_calls, text) -}}\n    {%- endif -%}\n    {{- "<|im_end|>\\n" -}}\n'
        "    {%- endgeneration -%}\n",
    ),
)


@dataclass(frozen=True)
class Published:
    """A form of a published template.

    Attributes:
        family: The family.
        template: The template.
        write: Writes a tokenizer with a template into a folder.
        opens: Whether the prompt of inference opens a think block that no argument closes.
    """

    family: str
    template: str
    write: Callable[..., str] = unusual.write_tokenizer
    opens: bool = False

    def tokenizer(self, folder: Path) -> str:
        """Writes its tokenizer; returns the folder."""
        return self.write(folder, template=self.template)


PUBLISHED = {
    "Qwen3.5": Published("qwen3_5", changed(EMBEDDED, *_GENERATED)),
    "Qwen3.6": Published("qwen3_5", changed(LATER["Qwen3.6"], *_GENERATED)),
    "Qwen3.8": Published("qwen3_5", changed(LATER["Qwen3.8"], *_GENERATED)),
    "Qwen3-VL Instruct": Published("qwen3_vl", _PLAIN),
    "Qwen3-VL Thinking": Published("qwen3_vl", _THINKING, opens=True),
    "Qwen2.5-VL": Published("qwen2_5_vl", _QWEN2_5),
    "InternVL3.5": Published("internvl", internvl_files.TEMPLATE, internvl_files.write_tokenizer),
    "Gemma 4": Published("gemma4", gemma4_files.EARLIER, gemma4_files.write_tokenizer),
    "Gemma 4, later": Published("gemma4", gemma4_files.TEMPLATE, gemma4_files.write_tokenizer),
}
