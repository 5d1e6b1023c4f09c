"""Chat templates that do what those of later models of the family do, in words of their own.

The published texts of Qwen3.6 and Qwen3.8 differ from that of Qwen3.5 as these differ from the embedded one:

- Qwen3.6 keeps the reasoning of earlier turns if ``preserve_thinking`` is true.
- Qwen3.8 keeps it unless ``preserve_thinking`` is given and false. ``reasoning_effort`` (``xhigh``, the default,
  ``medium`` or ``low``; others are refused) begins the system turn with a sentence, none for ``medium``, also in
  conversations without a system prompt, unless ``enable_thinking`` is false. Think blocks within the text of a message
  stay text.
"""

from __future__ import annotations

from vlmdata.preprocess.assets import EMBEDDED_TOKENIZER

EMBEDDED = (EMBEDDED_TOKENIZER / "chat_template.jinja").read_text()


def changed(template: str, *changes: tuple[str, str]) -> str:
    """Replaces texts of a template, each of which it has once."""
    for before, after in changes:
        assert template.count(before) == 1, before
        template = template.replace(before, after)
    return template


_GATE = "if loop.index0 > last.query"
_EFFORT = """
{%- set effort = "" -%}
{%- if enable_thinking is not defined or enable_thinking -%}
  {%- set chosen = reasoning_effort | default("xhigh") -%}
  {%- if chosen not in ["xhigh", "medium", "low"] -%}
    {{- raise_exception("No such effort: " ~ chosen) -}}
  {%- endif -%}
  {%- if chosen != "medium" -%}
    {%- set effort = "Think with effort " ~ chosen ~ ".\n\n" -%}
  {%- endif -%}
{%- endif -%}
{%- if tools -%}
"""
_SPLIT = """    {%- elif "</think>" in text -%}
      {%- set reasoning = text.split("</think>")[0].split("<think>")[-1] -%}
      {%- set text = text.split("</think>")[-1].lstrip("\\n") -%}
"""

#: By the model whose template does the same.
LATER = {
    "Qwen3.6": changed(EMBEDDED, (_GATE, f"{_GATE} or (preserve_thinking is defined and preserve_thinking is true)")),
    "Qwen3.8": changed(
        EMBEDDED,
        (_GATE, f"{_GATE} or preserve_thinking is not defined or preserve_thinking"),
        ("{%- if tools -%}\n", _EFFORT),
        ('"<|im_start|>system\\n# Tools', '"<|im_start|>system\\n" ~ effort ~ "# Tools'),
        ('{%- elif messages[0].role == "system" -%}', '{%- elif messages[0].role == "system" or effort -%}'),
        ('"<|im_start|>system\\n" ~ system ~', '"<|im_start|>system\\n" ~ (effort ~ system) | trim ~'),
        (_SPLIT, ""),
    ),
}
