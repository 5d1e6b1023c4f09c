"""``--train-turns each`` against transformers: every answer follows exactly what inference gives the model."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import encoded_image
from tests.preprocess.chat.unusual import write_tokenizer
from vlmdata.format.schema import sample_key
from vlmdata.media.decode import decode_image
from vlmdata.preprocess.config import ImageConfig, Overlong, PreprocessConfig, TrainThink, TrainTurns
from vlmdata.preprocess.conversation import Conversation, ImagePart, Message, TextPart
from vlmdata.preprocess.encode import EncodedSample, Encoder
from vlmdata.preprocess.encode.probe import _index_row
from vlmdata.preprocess.reject import RowRejected
from vlmdata.reasons import Reason
from vlmdata.verify.sample import SampleRules, audit_sample

END = "<|im_end|>\n"
EMPTY = "<think>\n\n</think>\n\n"
CALL = {"name": "look", "arguments": {"at": "the sky"}}
WEATHER = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
IMAGES = [ImagePart(encoded_image(64, 32 * (n + 1), seed=n), f"image {n}") for n in range(3)]


def each(tokenizer: Any, conversation: Conversation, **options: Any) -> list[EncodedSample | RowRejected]:
    options.setdefault("image", ImageConfig(1024, 16384))
    return Encoder(PreprocessConfig(train_turns=TrainTurns.EACH, **options), tokenizer).encode_all(conversation)


def samples(tokenizer: Any, conversation: Conversation, **options: Any) -> list[EncodedSample]:
    found = each(tokenizer, conversation, **options)
    assert all(isinstance(sample, EncodedSample) for sample in found), found
    return [sample for sample in found if isinstance(sample, EncodedSample)]


def says(text: str, **fields: Any) -> Message:
    return Message("assistant", (TextPart(text),), **fields)


def asks(*parts: str | ImagePart) -> Message:
    return Message("user", tuple(TextPart(part) if isinstance(part, str) else part for part in parts))


def split(sample: EncodedSample) -> tuple[list[int], list[int]]:
    """Ids before the first target, and from it to the end."""
    first = int(sample.loss_mask.argmax())
    return sample.input_ids[:first].tolist(), sample.input_ids[first : sample.length].tolist()


def template_messages(messages: tuple[Message, ...]) -> list[dict[str, Any]]:
    """Messages as transformers takes them, built apart from the renderer of vlmdata."""
    found: list[dict[str, Any]] = []
    for message in messages:
        content = [
            {"type": "text", "text": part.text}
            if isinstance(part, TextPart)
            else {"type": "image", "image": decode_image(part.data, 1 << 20).pixels}
            for part in message.parts
        ]
        fields: dict[str, Any] = {"role": message.role, "content": content}
        if message.reasoning is not None:
            fields["reasoning_content"] = message.reasoning
        if message.tool_calls:
            fields["tool_calls"] = [{"type": "function", "function": dict(call)} for call in message.tool_calls]
        found.append(fields)
    return found


def prompt(tokenizer: Any, conversation: Conversation, stop: int, sample: EncodedSample, thinking: bool) -> list[int]:
    """The ids that inference gives the model before message ``stop``; images expanded to the sample's tokens."""
    text = tokenizer.hf.apply_chat_template(
        template_messages(conversation.messages[:stop]),
        tools=list(conversation.tools) or None,
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=thinking,
    )
    ids = tokenizer.hf(text, add_special_tokens=False)["input_ids"]
    counts = iter([image.tokens for image in sample.items])
    return [id for token in ids for id in [token] * (next(counts) if token == tokenizer.info.image else 1)]


words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(
    lambda text: text.strip() and "think>" not in text and "<|" not in text and "tool_" not in text
)
questions = st.tuples(words, st.lists(st.sampled_from(IMAGES), max_size=2)).map(lambda q: asks(*q[1], q[0]))
answers = st.builds(
    lambda text, reasoning, weight: says(text, reasoning=reasoning, loss_weight=weight),
    words,
    st.one_of(st.none(), words),
    st.sampled_from([None, None, 0.5, 0.0]),
)
calls = st.builds(
    lambda reasoning, result: (says("", reasoning=reasoning, tool_calls=(CALL,)), Message("tool", (TextPart(result),))),
    st.one_of(st.none(), words),
    words,
)
exchanges = st.builds(
    lambda asked, called, answered: (asked, *(each for pair in called for each in pair), answered),
    questions,
    st.lists(calls, max_size=2),
    answers,
)
conversations = st.builds(
    lambda system, exchanged, tools: Conversation(
        (*system, *(message for exchange in exchanged for message in exchange)), tools
    ),
    st.sampled_from([(), (Message("system", (TextPart("Be brief."),)),)]),
    st.lists(exchanges, min_size=1, max_size=3),
    st.sampled_from([(), (WEATHER,)]),
)


@settings(max_examples=30, derandomize=True)
@given(conversation=conversations, think=st.sampled_from(TrainThink))
def test_the_ids_before_the_target_are_those_of_the_generation_prompt(
    tokenizer: Any, conversation: Conversation, think: TrainThink
) -> None:
    places = [
        n for n, message in enumerate(conversation.messages) if message.role == "assistant" and message.loss_weight != 0
    ]
    if not places:
        with pytest.raises(RowRejected, match="nothing to learn"):
            each(tokenizer, conversation, train_think=think)
        return
    made = samples(tokenizer, conversation, train_think=think)
    assert len(made) == len(places)
    opening, empty = (tokenizer.hf(text, add_special_tokens=False)["input_ids"] for text in ("<think>\n", EMPTY))
    for sample, place in zip(made, places, strict=True):
        before, target = split(sample)
        thinking, direct = (prompt(tokenizer, conversation, place, sample, thinking) for thinking in (True, False))
        # A think block that is learned begins in the prompt as well.
        if not (conversation.messages[place].reasoning or "").strip():
            assert before + (target[: len(empty)] if think is TrainThink.ALWAYS else []) == direct
        elif think is TrainThink.NEVER:  # the answer follows the reasoning, which the model writes itself
            assert before[: len(thinking)] == thinking
        else:
            assert before + target[: len(opening)] == thinking
        assert sample.target_turns == 1
        assert sample.loss_mask[len(before) : sample.length].all()


def test_each_sample_has_the_images_up_to_its_turn_and_they_are_the_same_objects(tokenizer: Any) -> None:
    conversation = Conversation((asks(IMAGES[0], "a"), says("b"), asks(IMAGES[1], IMAGES[2], "c"), says("d")))
    first, second = samples(tokenizer, conversation)
    assert [image.size for image in second.items] == [(32, 64), (64, 64), (96, 64)]
    assert first.items == second.items[:1]  # compared by identity: decoded once


def test_reasoning_of_every_turn_is_learned_in_its_own_sample(tokenizer: Any) -> None:
    conversation = Conversation((asks("a"), says("b", reasoning="First."), asks("c"), says("d", reasoning="Then.")))
    first, second = (tokenizer.hf.decode(split(sample)[1]) for sample in samples(tokenizer, conversation))
    assert (first, second) == (f"<think>\nFirst.\n</think>\n\nb{END}", f"<think>\nThen.\n</think>\n\nd{END}")
    assert [sample.dropped_reasoning for sample in samples(tokenizer, conversation, strict=True)] == [0, 0]


def test_a_turn_that_cannot_be_learned_is_rejected_alone_and_named(tokenizer: Any) -> None:
    broken = ImagePart(b"no image", "images[1]")
    conversation = Conversation((asks("a"), says("b"), asks(broken, "c"), says("d"), asks("e"), says("")))
    first, second, third = each(tokenizer, conversation)
    assert isinstance(first, EncodedSample)
    assert isinstance(second, RowRejected)
    assert second.reason is Reason.NOT_AN_IMAGE
    assert second.message.startswith("assistant turn 2 of 3: images[1]")
    assert isinstance(third, RowRejected)
    assert (third.reason, third.message) == (Reason.EMPTY_ANSWER, "assistant turn 3 of 3 has no text")


def test_turns_of_weight_0_are_context_and_weights_stay_with_their_turns(tokenizer: Any) -> None:
    messages = (asks("a"), says("b", loss_weight=0), asks("c"), says("d", loss_weight=2), asks("e"), says("f"))
    conversation = Conversation(messages, loss_weight=0.5)
    first, second = samples(tokenizer, conversation)
    assert (first.turn_weights, second.turn_weights) == ((), (0.0, 0.0, 0.5))
    assert first.loss_weights is None
    assert second.loss_weights is not None
    assert set(second.loss_weights.tolist()) == {0.0, 0.5}


def test_only_turns_that_are_too_long_are_cut_or_rejected(tokenizer: Any) -> None:
    conversation = Conversation((asks("a"), says("b"), asks("c"), says("d " * 100)))
    short, long = each(tokenizer, conversation, max_length=60)
    assert isinstance(short, EncodedSample)
    assert isinstance(long, RowRejected)
    assert long.reason is Reason.OVERLONG
    short, cut = samples(tokenizer, conversation, max_length=60, overlong=Overlong.TRUNCATE)
    assert (short.truncated, cut.truncated, cut.length) == (False, True, 60)


@settings(max_examples=30, derandomize=True)
@given(conversation=conversations)
def test_every_sample_passes_the_audit_of_verify(tokenizer: Any, conversation: Conversation) -> None:
    rules = SampleRules(tokenizer.info, 16, False, PreprocessConfig().model_family)
    if not any(message.role == "assistant" and message.loss_weight != 0 for message in conversation.messages):
        return
    for sample in samples(tokenizer, conversation):
        assert audit_sample(sample.to_sample(sample_key(0)), _index_row(sample), rules, sample.turn_weights) == []


# --- answers that begin with a newline ----------------------------------------------------------------------------

#: Writes texts as they are, with an empty think block or without.
VERBATIM = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and BLOCK %}<think>\n\n</think>\n\n{% endif %}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if BLOCK %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


@pytest.fixture(scope="module", params=["true", "false"], ids=["think block", "no think block"])
def verbatim(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from vlmdata.preprocess.chat.tokenizer import load_tokenizer

    template = VERBATIM.replace("BLOCK", request.param)
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("verbatim") / "tokenizer", template=template))


@settings(max_examples=40, derandomize=True)
@given(
    lead=st.text("\n \t", min_size=1, max_size=4),
    answer=words,
    turns=st.sampled_from([TrainTurns.EACH, TrainTurns.ALL]),
)
def test_an_answer_that_begins_with_whitespace_follows_the_prompt_of_inference(
    verbatim: Any, lead: str, answer: str, turns: TrainTurns
) -> None:
    conversation = Conversation((asks("a"), says(lead + answer), asks("c"), says("\n\n" + answer)))
    config = PreprocessConfig(train_turns=turns)
    made = Encoder(config, verbatim).encode_all(conversation)
    rules = SampleRules(verbatim.info, 16, turns is TrainTurns.ALL, config.model_family)
    for place, sample in zip((1, 3) if turns is TrainTurns.EACH else (1,), made, strict=True):
        assert isinstance(sample, EncodedSample), sample
        before, _ = split(sample)
        # The context of turn 2 is as inference tokenizes it: in one piece.
        assert before == prompt(verbatim, conversation, place, sample, thinking=False)
        messages = conversation.messages[: place + 1] if turns is TrainTurns.EACH else conversation.messages
        text = verbatim.hf.apply_chat_template(template_messages(messages), tokenize=False)
        assert verbatim.hf.decode(sample.input_ids[: sample.length]) == unicodedata.normalize("NFC", text)
        weights = (0.0, 1.0) if place == 3 else ()  # as the metadata of a weighted row has them
        assert audit_sample(sample.to_sample(sample_key(0)), _index_row(sample), rules, weights) == []


def test_a_newline_that_the_template_writes_belongs_to_the_header(tokenizer: Any, tmp_path: Path) -> None:
    """At inference it is in the prompt, as one token with the header's, so it must not be cut off."""
    from vlmdata.preprocess.chat.tokenizer import load_tokenizer

    template = VERBATIM.replace("BLOCK", "false").replace("{{ m.role }}\n", "{{ m.role }}\n\n")
    other = load_tokenizer(write_tokenizer(tmp_path / "tokenizer", template=template))
    with pytest.raises(RowRejected, match="it merges with the answer"):
        Encoder(PreprocessConfig(), other).encode(Conversation((asks("a"), says("\nb"))))
    assert np.array_equal(other.info.turns.assistant, tokenizer.info.turns.assistant)
