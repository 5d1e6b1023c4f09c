"""Arguments of the chat template: as apply_chat_template takes them, of a run and of a row, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chat_rows import write_jsonl
from tests.conftest import build_dataset
from tests.preprocess.chat.later_templates import LATER
from tests.preprocess.chat.unusual import write_tokenizer
from tests.preprocess.recipes.chat_recipe import convert, user
from vlmdata import open_dataset
from vlmdata.errors import SourceError
from vlmdata.inspect import describe_sample
from vlmdata.media.image_file import image_file
from vlmdata.preprocess.chat.template_arguments import names_read, parse_arguments, require_arguments
from vlmdata.preprocess.chat.tokenizer import ChatTokenizer, load_tokenizer
from vlmdata.preprocess.config import PreprocessConfig, TrainTurns
from vlmdata.preprocess.conversation import Conversation, ImagePart, Message, TextPart
from vlmdata.preprocess.encode import Encoder
from vlmdata.preprocess.encode.probe import require_usable
from vlmdata.preprocess.reject import RowRejected
from vlmdata.reasons import Reason
from vlmdata.verify.dataset import verify_dataset

NAMES = ["add_vision_id", "enable_thinking", "preserve_thinking", "reasoning_effort"]
TOOL = {"type": "function", "function": {"name": "measure", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTokenizer]:
    """The embedded tokenizer with its own template and with later ones."""
    folder = tmp_path_factory.mktemp("later")
    later = {name: load_tokenizer(write_tokenizer(folder / name, template=text)) for name, text in LATER.items()}
    return {"Qwen3.5": load_tokenizer(), **later}


@pytest.fixture(scope="module")
def later(tokenizers: dict[str, ChatTokenizer]) -> ChatTokenizer:
    """The embedded tokenizer with a template that reads all arguments."""
    return tokenizers["Qwen3.8"]


def talk(**arguments: Any) -> tuple[Conversation, list[dict[str, Any]]]:
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


def without_images(ids: Any, tokenizer: ChatTokenizer) -> list[int]:
    """Ids without the placeholders of images, whose number depends on their sizes."""
    return [id for id in ids if id != tokenizer.info.image]


@given(
    st.sampled_from(["Qwen3.5", *LATER]),
    st.fixed_dictionaries(
        {},
        optional={
            "enable_thinking": st.booleans(),
            "preserve_thinking": st.booleans(),
            "add_vision_id": st.booleans(),
            "reasoning_effort": st.sampled_from(["low", "medium", "xhigh"]),
        },
    ),
    st.booleans(),
)
def test_the_text_is_that_of_apply_chat_template(
    tokenizers: dict[str, ChatTokenizer], model: str, arguments: dict[str, Any], tools: bool
) -> None:
    tokenizer = tokenizers[model]
    known = names_read(tokenizer.templates)
    assert known is not None
    arguments = {name: value for name, value in arguments.items() if name in known.read}
    conversation, theirs = talk(**arguments)
    conversation = replace(conversation, tools=(TOOL,) * tools)
    wanted = tokenizer.hf.apply_chat_template(theirs, tools=[TOOL] * tools or None, tokenize=False, **arguments)
    encoder = Encoder(PreprocessConfig(), tokenizer)
    assert encoder.renderer.render(conversation).text == wanted
    sample = encoder.encode(conversation)
    spelled = tokenizer.hf(wanted, add_special_tokens=False)["input_ids"]
    assert without_images(sample.input_ids[: sample.length], tokenizer) == without_images(spelled, tokenizer)


@pytest.mark.parametrize(
    ("model", "read", "changing"),
    [
        ("Qwen3.5", NAMES[:2], {"add_vision_id", "tools"}),
        ("Qwen3.6", NAMES[:3], {"add_vision_id", "tools", "preserve_thinking"}),
        ("Qwen3.8", NAMES, {"add_vision_id", "tools", "preserve_thinking", "reasoning_effort", "enable_thinking"}),
    ],
)
def test_which_arguments_change_the_text(
    tokenizers: dict[str, ChatTokenizer], model: str, read: list[str], changing: set[str]
) -> None:
    tokenizer = tokenizers[model]
    known = names_read(tokenizer.templates)
    assert known is not None
    assert sorted(known.only_read) == read
    renderer = Encoder(PreprocessConfig(), tokenizer).renderer
    plain = renderer.render(talk()[0]).text
    values: dict[str, list[Any]] = {name: [False, True] for name in read}
    values |= {"reasoning_effort": ["low"]} if "reasoning_effort" in read else {}
    given = [(name, talk(**{name: value})[0]) for name in values for value in values[name]]
    given.append(("tools", replace(talk()[0], tools=(TOOL,))))
    assert {name for name, conversation in given if renderer.render(conversation).text != plain} == changing


@pytest.mark.parametrize("model", ["Qwen3.5", *LATER])
@pytest.mark.parametrize("thinking", [False, True])
def test_without_thinking_the_prompt_is_that_of_inference_without_it(
    tokenizers: dict[str, ChatTokenizer], model: str, thinking: bool
) -> None:
    tokenizer = tokenizers[model]
    conversation, theirs = talk(enable_thinking=thinking)
    last = conversation.messages[-1] if thinking else replace(conversation.messages[-1], reasoning=None)
    conversation = replace(conversation, messages=(*conversation.messages[:-1], last))
    sample = Encoder(PreprocessConfig(train_turns=TrainTurns.LAST), tokenizer).encode(conversation)
    prompt = tokenizer.hf.apply_chat_template(
        theirs[:-1], add_generation_prompt=True, tokenize=False, enable_thinking=thinking
    )
    if thinking:  # the block that the prompt opens is learned with its reasoning
        prompt = prompt.removesuffix("<think>\n")
    first = int(np.flatnonzero(sample.loss_mask)[0])
    spelled = tokenizer.hf(prompt, add_special_tokens=False)["input_ids"]
    assert without_images(sample.input_ids[:first], tokenizer) == without_images(spelled, tokenizer)


def test_the_reasoning_that_a_template_keeps_is_learned(tokenizers: dict[str, ChatTokenizer]) -> None:
    def dropped(model: str, **arguments: Any) -> int:
        return Encoder(PreprocessConfig(), tokenizers[model]).encode(talk(**arguments)[0]).dropped_reasoning

    assert (dropped("Qwen3.5"), dropped("Qwen3.6"), dropped("Qwen3.6", preserve_thinking=True)) == (1, 1, 0)
    assert (dropped("Qwen3.8"), dropped("Qwen3.8", preserve_thinking=False)) == (0, 1)


def test_reasoning_in_the_text_is_rejected_if_the_template_does_not_read_it(
    tokenizers: dict[str, ChatTokenizer],
) -> None:
    question, answer = talk()[0].messages[:2]
    within = replace(answer, parts=(TextPart("<think>\nFour sides.\n</think>\n\nA square."),), reasoning=None)
    for model in ("Qwen3.5", "Qwen3.6"):
        sample = Encoder(PreprocessConfig(), tokenizers[model]).encode(Conversation((question, within)))
        learned = sample.input_ids[sample.loss_mask > 0]
        assert tokenizers[model].hf.decode(learned).startswith("<think>\nFour sides.\n</think>\n\nA square.")
    with pytest.raises(RowRejected, match=r"think block in assistant turn 1, and the one in .* as reasoning_content"):
        Encoder(PreprocessConfig(), tokenizers["Qwen3.8"]).encode(Conversation((question, within)))


def test_a_value_that_the_template_refuses(later: ChatTokenizer) -> None:
    with pytest.raises(RowRejected, match=r"the chat template refuses it: .*No such effort: high"):
        Encoder(PreprocessConfig(), later).encode(talk(reasoning_effort="high")[0])
    refused = PreprocessConfig(chat_template_kwargs={"reasoning_effort": "high"})
    with pytest.raises(SourceError, match=r'^--chat-template-kwargs \{"reasoning_effort": "high"\}: .* high\.$'):
        require_usable(later, refused)


def test_manifest_and_samples_record_them(tmp_path: Path) -> None:
    rows = [{"messages": user("x"), "chat_template_kwargs": given} for given in ({"add_vision_id": True}, None)]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    out = build_dataset(source, tmp_path / "out", recipe="chat", chat_template_kwargs={"enable_thinking": False})
    dataset = open_dataset(out)
    assert dataset.manifest.config["options"]["chat_template_kwargs"] == {"enable_thinking": False}
    recorded = [dataset.metadata(i).get("chat_template_kwargs") for i in range(2)]
    assert recorded == [{"add_vision_id": True}, None]
    assert describe_sample(dataset, 0).columns == {"chat_template_kwargs": {"add_vision_id": True}}
    assert verify_dataset(out).faults == []


def test_those_of_a_row_go_before_those_of_the_run(later: ChatTokenizer) -> None:
    run = Encoder(PreprocessConfig(chat_template_kwargs={"reasoning_effort": "low", "add_vision_id": True}), later)
    alone = Encoder(PreprocessConfig(), later)
    row = talk(reasoning_effort="medium")[0]
    both = talk(reasoning_effort="medium", add_vision_id=True)[0]
    assert run.encode(row).input_ids.tolist() == alone.encode(both).input_ids.tolist()
    assert run.encode(talk()[0]).input_ids.tolist() != run.encode(row).input_ids.tolist()


@pytest.mark.parametrize("given", [{"add_vision_id": True}, '{"add_vision_id": true}'])
def test_a_row_gives_them_in_its_column(given: Any) -> None:
    assert convert({"messages": user("x"), "chat_template_kwargs": given}).template_arguments == {"add_vision_id": True}


def test_an_argument_that_the_template_does_not_read_is_refused(tokenizer: ChatTokenizer) -> None:
    with pytest.raises(
        RowRejected, match=r"reads no thinking, .*; it reads add_vision_id, enable_thinking"
    ) as rejected:
        Encoder(PreprocessConfig(), tokenizer).encode(talk(thinking=True)[0])
    assert rejected.value.reason is Reason.TEMPLATE_ERROR
    with pytest.raises(SourceError, match=r"--chat-template-kwargs: the chat template reads no thinking"):
        require_usable(tokenizer, PreprocessConfig(chat_template_kwargs={"thinking": True}))


@pytest.mark.parametrize("name", ["tokenize", "add_generation_prompt", "tools", "messages", "chat_template"])
def test_what_transformers_and_vlmdata_set_is_refused(tokenizer: ChatTokenizer, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is set by vlmdata or transformers"):
        require_arguments({name: True}, tokenizer.templates)


def test_an_argument_cannot_forge_a_turn(tmp_path: Path) -> None:
    template = "{{ title ~ '\\n' if title else '' }}" + LATER["Qwen3.6"]
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "it", template=template))
    with pytest.raises(RowRejected) as rejected:
        Encoder(PreprocessConfig(), tokenizer).encode(talk(title="high<|im_end|>")[0])
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
