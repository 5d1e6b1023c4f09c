"""Flags and weights of turns and rows become loss weights, or are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.preprocess.recipes.chat_recipe import answer, check_rejected, convert, user
from vlmdata.reasons import Reason

FLAGS = ("loss", "train", "training", "weight", "loss_scale", "loss_weight")
WEIGHTS = st.booleans() | st.integers(0, 9) | st.floats(0, 9)


@given(flags=st.dictionaries(st.sampled_from(FLAGS), WEIGHTS))
def test_flags_of_an_assistant_turn_multiply(flags: dict[str, Any]) -> None:
    expected = math.prod(map(float, flags.values())) if flags else None
    assert convert(answer(**flags)).messages[1].loss_weight == pytest.approx(expected)


@pytest.mark.parametrize("flag", FLAGS)
def test_the_turns_of_sharegpt_have_them_too(flag: str) -> None:
    turns = [{"from": "human", "value": "?"}, {"from": "gpt", "value": "yes", flag: False}]
    assert [message.loss_weight for message in convert({"conversations": turns}).messages] == [None, 0]


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("value", [0, 0.0, False, None, ""])
def test_other_turns_are_not_learned_and_may_say_so(flag: str, value: Any) -> None:
    conversation = convert({"messages": user("?", **{flag: value})})
    assert [message.loss_weight for message in conversation.messages] == [None, None]
    assert (conversation.unused, conversation.unknown) == ((), ())


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_other_turns_cannot_be_learned(role: str) -> None:
    row = {"messages": [{"role": role, "content": "?", "train": True}, *user("x")]}
    check_rejected(row, Reason.UNSUPPORTED_CONTENT, rf"messages\[0\]\.train is True in a {role} turn; only assistant")


@pytest.mark.parametrize("value", ["x", -1, -0.5, math.nan, math.inf, 10**400, [1], {"a": 1}])
def test_values_that_are_no_weights(value: Any) -> None:
    message = "is .*; a loss weight is true, false or a number of at least 0"
    check_rejected(answer(loss=value), Reason.MALFORMED_MESSAGES, rf"messages\[1\]\.loss {message}")
    check_rejected({**answer(), "weight": value}, Reason.MALFORMED_MESSAGES, f"weight {message}")


@given(weights=st.dictionaries(st.sampled_from(["weight", "loss_weight", "loss_scale"]), WEIGHTS))
def test_weights_of_a_row_multiply(weights: dict[str, Any]) -> None:
    conversation = convert({**answer(), **weights})
    assert conversation.loss_weight == pytest.approx(math.prod(map(float, weights.values())))
    assert isinstance(conversation.loss_weight, float)
    assert conversation.messages[1].loss_weight is None


@pytest.mark.parametrize(("text", "weight"), [("0.5", 0.5), ("2", 2), ("false", 0)])
def test_a_weight_of_a_row_may_be_text_as_in_csv(text: str, weight: float) -> None:
    assert convert({**answer(), "weight": text}).loss_weight == weight


def test_a_row_without_weights_has_weight_1() -> None:
    assert convert(answer()).loss_weight == 1


@pytest.mark.parametrize("flag", ["loss", "train", "training"])
@pytest.mark.parametrize("value", [False, "false"])
def test_a_row_that_says_it_is_not_learned_is_refused(flag: str, value: Any) -> None:
    check_rejected({"messages": user("?"), flag: value}, Reason.NO_TARGETS, f"{flag} of the row is {value}")


def test_a_measured_loss_of_a_row_is_no_flag() -> None:
    conversation = convert({"messages": user("?"), "loss": 0.0})
    assert (conversation.loss_weight, conversation.unknown) == (1.0, ("loss",))


def test_a_flag_that_is_text_is_shown_as_text() -> None:
    row = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!", "loss_scale": "0.5"}]}
    check_rejected(row, Reason.MALFORMED_MESSAGES, r"messages\[1\].loss_scale is '0.5'; a loss weight is")
