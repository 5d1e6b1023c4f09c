"""Chat templates tell by rendering how turns and images are written, or are refused with what they wrote."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2 import Environment

from vlmdata.families.chat import ChatFormat
from vlmdata.preprocess.processor.template import NotLearned, learned_chat, learned_image

_CONTENT = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<i><image></i>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
)


def rendering(turn: str, before: str = "") -> Any:
    """Returns what renders messages, each by a template with the variable ``m`` and ``CONTENT``."""
    text = before + "{% for m in messages %}" + turn.replace("CONTENT", _CONTENT) + "{% endfor %}"
    template = Environment().from_string(text)
    return lambda messages: template.render(messages=messages)


TOKENS = ("<s>", "</s>", "<start>", "<end>", "<answer>", "<image>", "<i>", "</i>")


@pytest.mark.parametrize(
    ("turn", "before", "start", "header", "end"),
    [
        ("<start>{{ m.role }}\nCONTENT<end>\n", "", "<start>", "assistant\n", "<end>"),
        ("<start>{{ m.role }}\nCONTENT<end>", "<s>", "<start>", "assistant\n", "<end>"),
        ("{% if m.role == 'user' %}<start>CONTENT<answer>{% else %}CONTENT</s>{% endif %}", "", "<answer>", "", "</s>"),
        (
            "{% if m.role == 'user' %}<start>: CONTENT{% else %}<answer>: CONTENT</s>{% endif %}",
            "",
            "<answer>",
            ": ",
            "</s>",
        ),
    ],
)
def test_turns_are_learned(turn: str, before: str, start: str, header: str, end: str) -> None:
    chat = learned_chat(rendering(turn, before), TOKENS, "<s>", "")
    assert chat == ChatFormat(start, end, header, begin=before, end_of_text="")


@pytest.mark.parametrize(
    "turn",
    [
        "{{ m.role }}: CONTENT\n",  # no tokens
        "<start>{{ m.role }}\nCONTENT\n",  # no end
        "{{ m.role }}: CONTENT<end>\n",  # no start
        "<start>{{ m.role }}{% if m.role == 'user' %}CONTENT{% endif %}<end>",  # no answers
    ],
)
def test_turns_without_tokens_of_their_own_are_refused(turn: str) -> None:
    with pytest.raises(NotLearned):
        learned_chat(rendering(turn), TOKENS, "<s>", "")


def test_the_token_of_an_image_is_the_one_that_the_processor_names() -> None:
    render = rendering("<start>{{ m.role }}\nCONTENT<end>\n")
    assert learned_image(render, TOKENS, ("<image>",)) == "<image>"
    assert learned_image(render, ("<start>", "<image>"), ()) == "<image>"
    with pytest.raises(NotLearned, match="names none"):
        learned_image(render, TOKENS, ("<other>",))
    with pytest.raises(NotLearned, match="no token"):
        learned_image(render, ("<start>", "<end>"), ("<image>",))
