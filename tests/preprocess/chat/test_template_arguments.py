"""Arguments of the chat template: as apply_chat_template takes them, of a run and of a row, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preprocess.assets import EMBEDDED_TOKENIZER
from preprocess.chat.template_arguments import names_read, parse_arguments, require_arguments
from preprocess.chat.tokenizer import ChatTokenizer, load_tokenizer
from preprocess.config import PreprocessConfig
from preprocess.conversation import Conversation, ImagePart, Message, TextPart
from preprocess.encode import Encoder
from preprocess.encode.probe import require_usable
from preprocess.reject import RowRejected
from tests.preprocess.chat.unusual import write_tokenizer
from tests.preprocess.recipes.chat_recipe import convert, user
from vlmdata.errors import SourceError
from vlmdata.media.image_file import image_file
from vlmdata.reasons import Reason

#: What later templates of the same family read: the effort as text, and reasoning of all turns.
_LATER = (
    "{%- if reasoning_effort is defined -%}{{ '<|im_start|>system\\nEffort: ' ~ reasoning_effort ~ '<|im_end|>\\n' }}"
    "{%- endif -%}"
)
_SHORT = {"enable_thinking": True, "preserve_thinking": True, "add_vision_id": True, "reasoning_effort": "high"}


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """The embedded tokenizer with a template of more arguments."""
    template = (EMBEDDED_TOKENIZER / "chat_template.jinja").read_text()
    template = template.replace("if loop.index0 > last.query", "if preserve_thinking or loop.index0 > last.query")
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("later") / "it", template=_LATER + template))


def talk(tokenizer: ChatTokenizer, **arguments: Any) -> tuple[Conversation, list[dict[str, Any]]]:
    """Two exchanges with an image and reasoning, and the same as transformers takes them."""
    picture = ImagePart(image_file(np.zeros((64, 64, 3), np.uint8), "png"))
    turns = (
        Message("user", (picture, TextPart("What is this?"))),
        Message("assistant", (TextPart("A square."),), reasoning="It has four sides."),
        Message("user", (TextPart("And its colour?"),)),
        Message("assistant", (TextPart("Black."),), reasoning="It is dark."),
    )
    theirs = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]},
        {"role": "assistant", "content": "A square.", "reasoning_content": "It has four sides."},
        {"role": "user", "content": "And its colour?"},
        {"role": "assistant", "content": "Black.", "reasoning_content": "It is dark."},
    ]
    return Conversation(turns, template_arguments=arguments), theirs


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "enable_thinking": st.booleans(),
            "preserve_thinking": st.booleans(),
            "add_vision_id": st.booleans(),
            "reasoning_effort": st.sampled_from(["low", "high", "a <|im_ b", ""]),
        },
    )
)
def test_the_text_is_that_of_apply_chat_template(later: ChatTokenizer, arguments: dict[str, Any]) -> None:
    conversation, theirs = talk(later, **arguments)
    wanted = later.hf.apply_chat_template(theirs, tokenize=False, **arguments)
    encoder = Encoder(PreprocessConfig(), later)
    assert encoder.renderer.render(conversation).text == wanted
    sample, image = encoder.encode(conversation), later.info.image
    ids = sample.input_ids[: sample.length]
    spelled = later.hf(wanted, add_special_tokens=False)["input_ids"]
    assert ids[ids != image].tolist() == [id for id in spelled if id != image]


def test_every_argument_changes_the_text(later: ChatTokenizer) -> None:
    renderer = Encoder(PreprocessConfig(), later).renderer
    plain = renderer.render(talk(later)[0]).text
    changed = {name for name, value in _SHORT.items() if renderer.render(talk(later, **{name: value})[0]).text != plain}
    assert changed == {"preserve_thinking", "add_vision_id", "reasoning_effort"}  # thinking ends a prompt, not a text


def test_those_of_a_row_go_before_those_of_the_run(later: ChatTokenizer) -> None:
    run = Encoder(PreprocessConfig(chat_template_kwargs={"reasoning_effort": "low", "add_vision_id": True}), later)
    alone = Encoder(PreprocessConfig(), later)
    row = talk(later, reasoning_effort="high")[0]
    both = talk(later, reasoning_effort="high", add_vision_id=True)[0]
    assert run.encode(row).input_ids.tolist() == alone.encode(both).input_ids.tolist()
    assert run.encode(talk(later)[0]).input_ids.tolist() != run.encode(row).input_ids.tolist()


@pytest.mark.parametrize("given", [{"add_vision_id": True}, '{"add_vision_id": true}'])
def test_a_row_gives_them_in_its_column(given: Any) -> None:
    assert convert({"messages": user("x"), "chat_template_kwargs": given}).template_arguments == {"add_vision_id": True}


def test_an_argument_that_the_template_does_not_read_is_refused(tokenizer: ChatTokenizer) -> None:
    with pytest.raises(
        RowRejected, match=r"reads no thinking, .*; it reads add_vision_id, enable_thinking"
    ) as rejected:
        Encoder(PreprocessConfig(), tokenizer).encode(talk(tokenizer, thinking=True)[0])
    assert rejected.value.reason is Reason.TEMPLATE_ERROR
    with pytest.raises(SourceError, match=r"--chat-template-kwargs: the chat template reads no thinking"):
        require_usable(tokenizer, PreprocessConfig(chat_template_kwargs={"thinking": True}))


@pytest.mark.parametrize("name", ["tokenize", "add_generation_prompt", "tools", "messages", "chat_template"])
def test_what_transformers_and_vlmdata_set_is_refused(tokenizer: ChatTokenizer, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is set by vlmdata or transformers"):
        require_arguments({name: True}, tokenizer.templates)


def test_an_argument_cannot_forge_a_turn(later: ChatTokenizer) -> None:
    forged = talk(later, reasoning_effort="high<|im_end|>")[0]
    with pytest.raises(RowRejected) as rejected:
        Encoder(PreprocessConfig(), later).encode(forged)
    assert rejected.value.reason is Reason.SPECIAL_TOKEN_TEXT


def test_a_name_that_a_template_gives_a_default_is_read() -> None:
    template = "{% if thinking is not defined %}{% set thinking = true %}{% endif %}{{ thinking }}{{ bos_token }}"
    found = names_read((template + "{% generation %}{{ effort }}{% endgeneration %}",))
    assert found is not None
    assert (found.read, found.only_read) == ({"thinking", "effort"}, {"effort"})
    assert names_read(("{% unknown %}",)) is None


@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), ("[1]", "is no JSON object"), ("x=1", "not JSON")])
def test_what_is_no_object_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_arguments(text)


def test_the_configuration_keeps_them() -> None:
    config = PreprocessConfig(chat_template_kwargs={"enable_thinking": False})
    kept = PreprocessConfig.from_json(json.loads(json.dumps(config.to_json())))
    assert kept.chat_template_kwargs == config.chat_template_kwargs
    assert "chat_template_kwargs" not in replace(config, chat_template_kwargs={}).to_json()
