"""What is learned under templates in the forms of the published ones, compared with transformers and with the rows."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.chat_rows import write_jsonl
from tests.conftest import encoded_image, tree_bytes
from tests.preprocess.chat.published import PUBLISHED
from vlmdata.format.schema import sample_key
from vlmdata.preprocess.chat.inference import opens_block
from vlmdata.preprocess.chat.render import Renderer
from vlmdata.preprocess.chat.targets import target_spans
from vlmdata.preprocess.chat.template_arguments import TemplateNames, names_read, require_arguments
from vlmdata.preprocess.chat.tokenizer import ChatTokenizer, load_tokenizer
from vlmdata.preprocess.config import PreprocessConfig, SpecialText, TrainThink, TrainTurns
from vlmdata.preprocess.conversation import Conversation, ImagePart, Message, TextPart
from vlmdata.preprocess.encode import EncodedSample, Encoder
from vlmdata.preprocess.encode.encoder import encode_turns
from vlmdata.preprocess.encode.kept import Kept, kept_text
from vlmdata.preprocess.encode.probe import _index_row
from vlmdata.preprocess.recipes.base import Candidate, load_recipe
from vlmdata.preprocess.recode.run import OldDataset
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.retokenize.run import retokenize_dataset
from vlmdata.preprocess.row import Row
from vlmdata.preprocess.run.dataset import preprocess_dataset
from vlmdata.preprocess.shards.fingerprints import identity_changes
from vlmdata.preprocess.sources.open import open_source
from vlmdata.reasons import Reason
from vlmdata.storage import open_store
from vlmdata.verify.sample import SampleRules, audit_sample

CHATML = [name for name, form in PUBLISHED.items() if form.family != "gemma4"]
READ_THINKING = ["Qwen3.5", "Qwen3.6", "Qwen3.8"]
#: Templates that move no think block out of the text of a message.
LEAVE_TEXT = ["Qwen3-VL Instruct", "Qwen2.5-VL", "InternVL3.5"]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTokenizer]:
    folder = tmp_path_factory.mktemp("published")
    return {
        name: load_tokenizer(form.tokenizer(folder / str(number)), None, form.family)
        for number, (name, form) in enumerate(PUBLISHED.items())
    }


def said(role: Any, text: str, **more: Any) -> Message:
    return Message(role, (TextPart(text),), **more)


def asked(*answers: str | tuple[str, str], **more: Any) -> Conversation:
    """Questions with these answers, or answers with their reasoning."""
    messages = []
    for number, answer in enumerate(answers):
        text, reasoning = (answer, None) if isinstance(answer, str) else answer
        messages += [said("user", f"Question {number}?"), said("assistant", text, reasoning=reasoning)]
    return Conversation(tuple(messages), **more)


def learned(
    tokenizer: ChatTokenizer, talk: Conversation, think: TrainThink = TrainThink.ALWAYS
) -> tuple[list[int], list[bool]]:
    """The tokens of a conversation, and which of them are targets."""
    weights = (1.0,) * len(talk.answers)
    rendered, tokens, turns = encode_turns(Renderer(tokenizer, SpecialText.REJECT), talk, weights, think)
    spans = target_spans(tokens, turns, weights, think, rendered.text)
    return tokens.ids.tolist(), (spans.weights > 0).tolist()


def text_of(tokenizer: ChatTokenizer, talk: Conversation, think: TrainThink) -> str:
    """What is learned of a conversation, without the ends of turns."""
    ids, targets = learned(tokenizer, talk, think)
    text = tokenizer.hf.decode(np.array(ids)[targets])
    return text.replace(f"{tokenizer.family.chat.turn_end}\n", "")


CALL = {"id": "a", "name": "look", "arguments": {"place": "here"}}
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks at a place."}}
TALKS = {
    "one turn": asked("An answer."),
    "several turns": asked("One.", "Two\nlines.", "Three: 1 < 2."),
    "a system prompt": Conversation((said("system", "Be brief."), *asked("Yes.").messages)),
    "reasoning": asked(("Four.", "Two and two.")),
    "reasoning in several turns": asked(("Four.", "Two and two."), ("Six.", "Three and three.")),
    "reasoning in the text": asked("<think>\nTwo and two.\n</think>\n\nFour."),
    "the answer in the question": Conversation((said("user", "An answer."), said("assistant", "An answer."))),
    "calls": Conversation(
        (
            said("user", "Where?"),
            Message("assistant", (), None, (CALL,)),
            said("tool", "dark", call_id="a"),
            said("assistant", "It is dark."),
        ),
        tools=(TOOL,),
    ),
}
#: Templates that know no tools.
WITHOUT_TOOLS = ["Qwen2.5-VL", "InternVL3.5"]


def messages_of(talk: Conversation) -> list[dict[str, Any]]:
    """The conversation as users of transformers give it."""
    messages = []
    for message in talk.messages:
        calls = [{"id": c["id"], "type": "function", "function": dict(list(c.items())[1:])} for c in message.tool_calls]
        messages.append(
            {"role": message.role, "content": message.text}
            | ({"reasoning_content": message.reasoning} if message.reasoning is not None else {})
            | ({"tool_calls": calls} if calls else {})
            | ({"tool_call_id": message.call_id} if message.call_id else {})
        )
    return messages


@pytest.mark.parametrize("kind", TALKS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_targets_are_those_of_the_generation_tag(tokenizers: dict[str, ChatTokenizer], name: str, kind: str) -> None:
    tokenizer, talk = tokenizers[name], TALKS[kind]
    if (kind == "calls" and name in WITHOUT_TOOLS) or (kind == "reasoning in the text" and name == "Qwen3.8"):
        with pytest.raises(RowRejected) as raised:
            learned(tokenizer, talk)
        assert raised.value.reason is Reason.TEMPLATE_ERROR
        return
    wanted = tokenizer.hf.apply_chat_template(
        messages_of(talk), tools=list(talk.tools) or None, return_dict=True, return_assistant_tokens_mask=True
    )
    marked = np.array(wanted["assistant_masks"], bool)
    for start in tokenizer.info.turns.response[:1]:  # the model ends a call with it, which the tag leaves out
        marked |= (np.array(wanted["input_ids"]) == start) & np.roll(marked, 1)
    assert learned(tokenizer, talk) == (wanted["input_ids"], marked.tolist())


# --- nothing that an answer says is lost, and nothing is learned as what it is not ------------------------------------

PIECES = ("<think>", "</think>", "\n", "\n\n", " ", "Sure.", "So 2 + 2.", "Four.", "`")


def marks_removed(text: str) -> str:
    return "".join(re.sub(r"</?think>", "", text).split())


@example(text="<think>\nr1\n</think>\n\nFirst part.\n\n<think>\nr2\n</think>\n\nSecond part.")
@example(text="Sure, let me think.\n<think>\nTwo and two.\n</think>\n\nThe result is 4.")
@example(text="The tag </think> ends it.")
@example(text="Two and two.\n</think>\n\nFour.")
@given(text=st.lists(st.sampled_from(PIECES), min_size=1, max_size=9).map("".join).filter(str.strip))
def test_a_row_is_learned_whole_or_rejected(tokenizers: dict[str, ChatTokenizer], text: str) -> None:
    closed = text.split("</think>")
    own_line = not (closed[0].rpartition("\n")[2] + closed[-1].partition("\n")[0]).strip()
    begins = text.lstrip().startswith("<think>") or (own_line and "<think>" not in closed[0])
    for name in CHATML:
        try:
            found = text_of(tokenizers[name], asked(text), TrainThink.ALWAYS)
        except RowRejected as error:
            if "think" in text and error.reason is Reason.TEMPLATE_ERROR:
                continue
            raise
        assert marks_removed(found) == marks_removed(text), name
        reasoning, _, words = found.removeprefix("<think>").partition("</think>")
        if name not in LEAVE_TEXT and reasoning.strip():  # the template told reasoning from words: so did the row
            assert begins, (name, found)
            assert marks_removed(words) == marks_removed("</think>".join(closed[1:])), name


def test_a_rejection_names_what_is_lost(tokenizers: dict[str, ChatTokenizer]) -> None:
    text = "<think>\nr1\n</think>\n\nFirst part.\n\n<think>\nr2\n</think>\n\nSecond part."
    with pytest.raises(
        RowRejected, match=r"turn 1; the message says 'First part.', which is left out or moved\. Give rea"
    ):
        learned(tokenizers["Qwen3.5"], asked(text))
    with pytest.raises(RowRejected, match=r"says 'The tag', which .*; an empty one \(\"\"\) keeps think tags as text"):
        learned(tokenizers["Qwen3.5"], asked("The tag </think> ends it."))
    kept = text_of(tokenizers["Qwen3.5"], asked(("The tag </think> ends it.", "")), TrainThink.AUTO)
    assert kept == "The tag </think> ends it."


@pytest.mark.parametrize("name", ["Gemma 4", "Gemma 4, later"])
def test_marks_of_gemma_in_an_answer_are_special_tokens(tokenizers: dict[str, ChatTokenizer], name: str) -> None:
    with pytest.raises(RowRejected) as raised:
        learned(tokenizers[name], asked("Sure. <|channel>thought\nTwo.\n<channel|>Four."))
    assert raised.value.reason is Reason.SPECIAL_TOKEN_TEXT


# --- reasoning is never learned ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LEAVE_TEXT)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<think>two and two</think>\n<answer>4</answer>", "<answer>4</answer>"),
        ("<think>two and two</think>4", "4"),
        ("\n<think>\ntwo and two\n</think>\n\n4", "4"),
        ("<think>\ntwo and two\n</think>\n\n4", "4"),
        ("<think>two</think>\n\n\n\n4", "\n\n4"),
        ("<think> two </think> 4", " 4"),
        ("4", "4"),
        ("<think>two and two", None),
        ("two\n</think>\n\n4", None),
        ("Sure. <think>two</think> 4", None),
        ("<think>two</think> 4 <think>five</think> 9", None),
    ],
)
def test_reasoning_in_the_text_is_not_learned(
    tokenizers: dict[str, ChatTokenizer], name: str, text: str, words: str | None
) -> None:
    if words is None:
        with pytest.raises(RowRejected) as raised:
            text_of(tokenizers[name], asked(text), TrainThink.NEVER)
        assert raised.value.reason is Reason.UNSUPPORTED_CONTENT
    else:
        assert text_of(tokenizers[name], asked(text), TrainThink.NEVER) == words


# --- the prompt of inference ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_block_that_inference_opens_is_learned(tokenizers: dict[str, ChatTokenizer], name: str) -> None:
    """Its end is taught, and what precedes the targets is a prompt of inference."""
    tokenizer, opens = tokenizers[name], PUBLISHED[name].opens
    given = {"enable_thinking": False} if name in READ_THINKING else {}
    talk = asked("One.", "Two.", template_arguments=given)
    assert opens_block(tokenizer, {}) == opens
    ids, targets = learned(tokenizer, talk, TrainThink.AUTO)
    assert ("</think>" in tokenizer.hf.decode(np.array(ids)[targets])) == opens
    prompt = tokenizer.hf.apply_chat_template(
        messages_of(talk)[:3], tokenize=False, add_generation_prompt=True, **given
    )
    last = len(targets) - targets[::-1].index(False)
    if name != "Gemma 4, later":  # whose prompt ends with a block that its turns lack
        assert tokenizer.hf.decode(ids[:last]) == prompt.removesuffix("<think>\n" if opens else "")


def test_a_block_that_inference_opens_after_a_tool(tokenizers: dict[str, ChatTokenizer]) -> None:
    tokenizer, thinks = tokenizers["Gemma 4, later"], {"enable_thinking": True}
    assert [opens_block(tokenizer, given, True) for given in ({}, thinks, {"enable_thinking": False})] == [0, 1, 0]
    assert not opens_block(tokenizer, thinks)
    for think in (False, True):
        talk = replace(TALKS["calls"], template_arguments={"enable_thinking": think})
        config = PreprocessConfig(family="gemma4", train_turns=TrainTurns.EACH)
        samples = Encoder(config, tokenizer).encode_all(talk)
        assert [isinstance(each, EncodedSample) and each.unlike_inference for each in samples] == [False, think]


def test_a_given_argument_stays(tokenizers: dict[str, ChatTokenizer]) -> None:
    """With thinking switched on, no other argument closes the block."""
    thinks = {"enable_thinking": True}
    assert opens_block(tokenizers["Qwen3.5"], thinks)
    found = text_of(tokenizers["Qwen3.5"], asked("A.", template_arguments=thinks), TrainThink.AUTO)
    assert found == "<think>\n\n</think>\n\nA."


def test_a_dataset_of_an_earlier_version_without_these_blocks_is_not_continued(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"messages": messages_of(asked("A."))}])
    name = PUBLISHED["Qwen3-VL Thinking"].tokenizer(tmp_path / "tokenizer")
    config = PreprocessConfig(tokenizer=name, family="qwen3_vl", recipe="chat")
    preprocess_dataset(open_source(str(rows), recipe="chat"), tmp_path / "out", config)
    made = json.loads((tmp_path / "out" / "manifest.json").read_text())["config"]
    kept = {name: value for name, value in made["fingerprints"].items() if name != "think_block"}
    (change,) = identity_changes({"config": made | {"fingerprints": kept}}, {"config": made, "tokenizer": {}})
    assert change.startswith("config.fingerprints.think_block")


def test_a_dataset_with_these_blocks_is_retokenized(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"messages": messages_of(asked("A."))}])
    thinking, plain = (
        PUBLISHED[name].tokenizer(tmp_path / name) for name in ("Qwen3-VL Thinking", "Qwen3-VL Instruct")
    )
    for before, now in ((plain, thinking), (thinking, plain)):
        config, other = (PreprocessConfig(tokenizer=name, family="qwen3_vl", recipe="chat") for name in (before, now))
        for name, options in (("old", config), ("wanted", other)):
            preprocess_dataset(open_source(str(rows), recipe="chat"), tmp_path / name, options, overwrite=True)
        old = OldDataset.open(tmp_path / "old")
        source = open_source(str(rows), recipe="chat")
        retokenize_dataset(old, open_store(tmp_path / "again"), other, source=source, overwrite=True)
        assert tree_bytes(tmp_path / "again") == tree_bytes(tmp_path / "wanted")


# --- tools, parts and prompts -----------------------------------------------------------------------------------------

GEMMA = ["Gemma 4", "Gemma 4, later"]


def calls(*responses: Message, ids: bool = True) -> Conversation:
    """A question, calls of two tools, their responses and the answer."""
    asked_for = tuple({**({"id": name} if ids else {}), "name": name, "arguments": {}} for name in ("look", "ask"))
    asks = (said("user", "Where?"), Message("assistant", (), None, asked_for))
    return Conversation((*asks, *responses, said("assistant", "It is dark.")))


@pytest.mark.parametrize("name", GEMMA)
def test_a_response_may_name_its_tool(tokenizers: dict[str, ChatTokenizer], name: str) -> None:
    tokenizer = tokenizers[name]
    look, ask = said("tool", "dark", tool_name="look"), said("tool", "nobody", tool_name="ask")
    ids, targets = learned(tokenizer, calls(look, ask))
    text = tokenizer.hf.decode(ids)
    assert 'response:look{value:<|"|>dark<|"|>}' in text
    assert 'response:ask{value:<|"|>nobody<|"|>}' in text
    assert tokenizer.hf.decode(np.array(ids)[targets]).endswith("It is dark.<turn|>\n")
    for talk in (
        calls(look, said("tool", "nobody")),
        calls(look, said("tool", "nobody", tool_name="other")),
        calls(look, replace(ask, call_id="look")),
        calls(look, ask, ids=False),  # the template would write the name of the last call for both
    ):
        with pytest.raises(RowRejected, match="which is the id of no call before it, or of several"):
            learned(tokenizer, talk)


def test_a_stored_conversation_is_the_same() -> None:
    talk = calls(said("tool", "dark", tool_name="look"), said("tool", "nobody", call_id="ask"))
    assert Kept.read(kept_text(talk, Candidate(talk), 1)).rebuilt(lambda *_: pytest.fail("it has no images")) == talk


def test_a_template_that_writes_another_name_is_noticed(tmp_path: Path) -> None:
    form = PUBLISHED["Gemma 4"]
    template = form.template.replace("other.name or 'unknown'", "'unknown'")
    tokenizer = load_tokenizer(form.write(tmp_path / "tokenizer", template=template), None, "gemma4")
    with pytest.raises(RowRejected, match=r"wrote .*response:unknown\{.* as a response of the tool 'look'"):
        learned(tokenizer, calls(said("tool", "dark", tool_name="look"), said("tool", "", tool_name="ask")))


@pytest.mark.parametrize("name", [*GEMMA, "Qwen3.5", "Qwen3-VL Instruct"])
def test_an_image_in_a_response_is_context(tokenizers: dict[str, ChatTokenizer], name: str) -> None:
    tokenizer, family = tokenizers[name], PUBLISHED[name].family
    seen = Message("tool", (TextPart("dark"), ImagePart(encoded_image(64, 64))), call_id="look")
    talk = calls(seen, said("tool", "nobody", call_id="ask"))
    config = PreprocessConfig(family=family)
    sample = Encoder(config, tokenizer).encode(talk)
    ids, mask = sample.input_ids[: sample.length], sample.loss_mask[: sample.length] == 1
    assert not mask[np.isin(ids, tokenizer.info.item_ids)].any()
    assert (ids == tokenizer.info.image).any()
    assert "It is dark." in tokenizer.hf.decode(ids[mask])
    rules = SampleRules(tokenizer.info, config.pad_multiple, True, config.model_family)
    assert list(audit_sample(sample.to_sample(sample_key(0)), _index_row(sample), rules)) == []


@pytest.mark.parametrize("name", PUBLISHED)
def test_parts_of_text_are_joined_as_the_template_does(tokenizers: dict[str, ChatTokenizer], name: str) -> None:
    tokenizer, parts = tokenizers[name], (TextPart("Hi "), TextPart("you.\n"))
    talk = Conversation((Message("user", parts), Message("assistant", parts)))
    content = [{"type": "text", "text": part.text} for part in parts]
    wanted = tokenizer.hf.apply_chat_template([{"role": role, "content": content} for role in ("user", "assistant")])
    assert learned(tokenizer, talk)[0] == wanted["input_ids"]


def test_reasoning_may_have_marks_of_other_families(tokenizers: dict[str, ChatTokenizer]) -> None:
    row = {"messages": messages_of(asked(("Four.", "A </think> b")))}
    (user, answer) = load_recipe("chat")(Row(0, row)).messages
    assert answer.reasoning == "A </think> b"
    learned(tokenizers["Gemma 4"], Conversation((user, answer)))
    with pytest.raises(RowRejected, match=r"reasoning_content of assistant turn 1 has </think>, .* without think tags"):
        learned(tokenizers["Qwen3.5"], Conversation((user, answer)))


def test_a_prompt_that_ends_in_an_answer_is_rejected() -> None:
    prompt = messages_of(asked("The result is"))
    row = {"prompt": prompt, "completion": [{"role": "assistant", "content": " 4."}]}
    with pytest.raises(RowRejected, match=r"prompt\[1\] ends the prompt with .*, and completion\[0\] goes on"):
        load_recipe("chat")(Row(0, row))


@pytest.mark.parametrize(
    ("name", "argument"),
    [("Qwen3.5", "reasoning"), ("Qwen3.8", "effort"), ("Gemma 4", "role"), ("Gemma 4, later", "words")],
)
def test_a_name_that_the_template_sets_is_no_argument(name: str, argument: str) -> None:
    with pytest.raises(ValueError, match=f"the chat template reads no {argument}, which would have no effect"):
        require_arguments({argument: "x"}, (PUBLISHED[name].template,))


def test_a_name_with_a_default_is_an_argument() -> None:
    template = "{% if x is not defined %}{% set x = 1 %}{% endif %}{% set y = y or 2 %}{% set z = 3 %}{{ x ~ y ~ z }}"
    assert names_read((template,)) == TemplateNames(frozenset("xy"), frozenset())
