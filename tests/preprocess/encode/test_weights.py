"""What each token counts in the loss: weight of the sample x weight of the turn x whether the turn is learned."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import encoded_image
from vlmdata.preprocess.config import ImageConfig, Overlong, PreprocessConfig, TrainTurns
from vlmdata.preprocess.conversation import Conversation, ImagePart, Message, TextPart
from vlmdata.preprocess.encode import EncodedSample, Encoder
from vlmdata.preprocess.encode.sample import LEAST, MOST
from vlmdata.preprocess.reject import RowRejected
from vlmdata.reasons import Reason

IMAGE = ImagePart(encoded_image(64, 64))
WEIGHT = st.none() | st.just(0) | st.just(1) | st.floats(1e-3, 1e3)


def talk(*weights: float | None, sample: float = 1.0, answers: tuple[str, ...] | None = None) -> Conversation:
    """A question with a picture and an answer per weight."""
    messages: list[Message] = []
    for number, weight in enumerate(weights):
        answer = answers[number] if answers else f"Answer number {number}."
        messages.append(Message("user", (IMAGE, TextPart(f"Question {number}?"))))
        messages.append(Message("assistant", (TextPart(answer),), loss_weight=weight))
    return Conversation(tuple(messages), loss_weight=sample)


def encode(tokenizer: Any, conversation: Conversation, **options: Any) -> EncodedSample:
    options.setdefault("image", ImageConfig(1024, 1024))
    return Encoder(PreprocessConfig(**options), tokenizer).encode(conversation)


def reason(tokenizer: Any, conversation: Conversation, **options: Any) -> tuple[Reason, str]:
    with pytest.raises(RowRejected) as caught:
        encode(tokenizer, conversation, **options)
    return caught.value.reason, caught.value.message


def plain(conversation: Conversation) -> Conversation:
    """The same without any weight."""
    messages = tuple(dataclasses.replace(message, loss_weight=None) for message in conversation.messages)
    return dataclasses.replace(conversation, messages=messages, loss_weight=1.0)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(weights=st.lists(WEIGHT, min_size=1, max_size=4), sample=st.sampled_from([1, 0.25, 3.7]), last=st.booleans())
def test_every_token_weighs_what_its_turn_does(
    tokenizer: Any, weights: list[float | None], sample: float, last: bool
) -> None:
    conversation, turns = talk(*weights, sample=sample), TrainTurns.LAST if last else TrainTurns.ALL
    wanted = [np.float32(sample * (1 if weight is None else weight)) for weight in weights]
    if last:
        wanted[:-1] = [np.float32(0)] * (len(wanted) - 1)
    if not any(wanted):
        assert reason(tokenizer, conversation, train_turns=turns)[0] is Reason.NO_TARGETS
        return
    found = encode(tokenizer, conversation, train_turns=turns)
    whole = encode(tokenizer, plain(conversation))
    # Of the sample without weights every turn is a target: the n-th run of targets is the n-th turn.
    expected, number = np.zeros(len(whole.loss_mask), np.float32), -1
    for i, target in enumerate(whole.loss_mask):
        number += bool(target and not whole.loss_mask[i - 1])
        expected[i] = wanted[number] if target else 0
    weights_found = found.loss_mask.astype(np.float32) if found.loss_weights is None else found.loss_weights
    assert weights_found.dtype == np.float32
    assert weights_found.tolist() == expected.tolist()
    assert found.loss_mask.tolist() == (expected > 0).astype(int).tolist()
    assert found.target_turns == sum(weight > 0 for weight in wanted)
    assert (found.loss_weights is None) == bool(set(expected.tolist()) <= {0.0, 1.0})
    for name in ("input_ids", "position_ids"):
        assert np.array_equal(getattr(found, name), getattr(whole, name))


def test_weights_of_1_leave_no_trace(tokenizer: Any) -> None:
    marked, unmarked = encode(tokenizer, talk(1, 1.0, sample=1)), encode(tokenizer, talk(None, None))
    for found in (marked, unmarked):
        assert found.loss_weights is None
        assert found.turn_weights == ()
    assert marked.loss_mask.tolist() == unmarked.loss_mask.tolist()


def test_a_turn_that_is_not_learned_may_be_empty(tokenizer: Any) -> None:
    found = encode(tokenizer, talk(0, None, answers=("", "Yes.")))
    assert found.turn_weights == (0.0, 1.0)
    assert found.loss_weights is None  # what is learned weighs 1
    assert reason(tokenizer, talk(0.5, None, answers=("", "Yes.")))[0] is Reason.EMPTY_ANSWER


@pytest.mark.parametrize(
    ("conversation", "options", "message"),
    [
        (talk(None, 2.0, sample=0), {}, "nothing to learn: the loss weight of the sample is 0"),
        (talk(0), {}, "nothing to learn: the loss weight of the only assistant turn is 0"),
        (talk(0, 0), {}, "nothing to learn: the loss weights of all 2 assistant turns are 0"),
        (
            talk(1, 0),
            {"train_turns": TrainTurns.LAST},
            "weight of the last assistant turn is 0, and only that turn",
        ),
    ],
)
def test_a_sample_without_targets_is_rejected(
    tokenizer: Any, conversation: Conversation, options: dict[str, Any], message: str
) -> None:
    found, said = reason(tokenizer, conversation, **options)
    assert found is Reason.NO_TARGETS
    assert message in said


@pytest.mark.parametrize(("turn", "sample"), [(1e-9, 1), (1e-30, 1e-30), (1e9, 1), (1e200, 1e200), (1e-4, 1e-5)])
def test_a_weight_out_of_bounds_is_rejected(tokenizer: Any, turn: float, sample: float) -> None:
    found, said = reason(tokenizer, talk(1.0, turn, sample=sample))
    assert found is Reason.LOSS_WEIGHT
    assert "it must be 0 or from 1e-08 to 1e+08" in said


def test_the_bounds_themselves_are_allowed_and_so_is_an_odd_weight_of_a_turn_that_is_not_learned(
    tokenizer: Any,
) -> None:
    assert encode(tokenizer, talk(LEAST, MOST)).turn_weights == (float(np.float32(LEAST)), float(np.float32(MOST)))
    assert encode(tokenizer, talk(1e300, None), train_turns=TrainTurns.LAST).turn_weights == ()
    assert math.isfinite(float(np.float32(MOST)))


def test_a_cut_answer_keeps_its_weight_and_an_unlearned_one_is_not_cut(tokenizer: Any) -> None:
    long = ("Short.", "word " * 60)
    whole = encode(tokenizer, talk(0.5, 2.0, answers=long))
    cut = encode(tokenizer, talk(0.5, 2.0, answers=long), max_length=whole.length - 9, overlong=Overlong.TRUNCATE)
    assert cut.truncated
    assert cut.loss_weights is not None
    assert whole.loss_weights is not None
    assert np.array_equal(cut.loss_weights[: cut.length], whole.loss_weights[: cut.length])
    assert not cut.loss_weights[cut.length :].any()
    found, said = reason(tokenizer, talk(0.5, 0, answers=long), max_length=whole.length - 9, overlong=Overlong.TRUNCATE)
    assert found is Reason.OVERLONG
    assert "it does not end with a learned answer" in said
