"""Gemma 4's budgets, values, tools and reasoning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import vlmdata
from tests.chat_rows import write_jsonl
from tests.conftest import build_dataset, encoded_image
from tests.families.gemma4_files import processor, write_tokenizer
from tests.families.reference import TOKEN
from vlmdata.errors import UsageError
from vlmdata.families.gemma4 import BUDGETS, FAMILY
from vlmdata.inspect import describe_dataset, describe_sample
from vlmdata.preprocess.chat.tokenizer import load_tokenizer
from vlmdata.preprocess.config import ImageConfig, PreprocessConfig, TrainTurns
from vlmdata.preprocess.conversation import Conversation, ImagePart, Message, TextPart
from vlmdata.preprocess.encode import Encoder, encode_image
from vlmdata.preprocess.recipes.base import load_recipe
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.row import Row
from vlmdata.verify.dataset import verify_dataset

sides = st.integers(1, 10_000)


@given(height=sides, width=sides, budget=st.sampled_from(BUDGETS))
def test_images_fill_the_budget_as_the_processors_do(height: int, width: int, budget: int) -> None:
    from transformers.models.gemma4.image_processing_gemma4 import get_aspect_ratio_preserving_size

    wanted = get_aspect_ratio_preserving_size(height, width, 16, 9 * budget, 3)
    assert FAMILY.image_size(height, width, FAMILY.min_pixels, budget * TOKEN) == wanted


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ImageConfig(max_pixels=1_003_520), r"max_pixels is 1003520; the budgets of family gemma4 are 161280 \(70 tok"),
        (ImageConfig(200_704), r"min_pixels is 200704, without effect in family gemma4, .* drop it"),
        (ImageConfig(max_pixels=2_304), r"max_pixels is 2304, less than min_pixels 161280 \(the default of family"),
    ],
)
def test_a_budget_out_of_range_is_refused(config: ImageConfig, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        config.bounds(FAMILY)


def test_the_data_may_give_the_budget_of_an_image() -> None:
    def encoded(**asked: int) -> Any:
        return encode_image(ImagePart(encoded_image(), **asked), ImageConfig(), FAMILY, "image")[0].tokens

    assert (encoded(), encoded(max_pixels=70 * TOKEN), encoded(max_pixels=1_120 * TOKEN)) == (256, 64, 33**2)
    with pytest.raises(RowRejected, match=r"image: max_pixels is 200704; the budgets of family gemma4 are"):
        encoded(max_pixels=200_704)


def test_images_are_padded_to_the_largest() -> None:
    values, grids = torch.rand(9 * 3, 768), torch.tensor([[1, 3, 3], [1, 3, 6]])
    found = FAMILY.image_inputs(values, grids)
    assert found["pixel_values"].shape == (2, 18, 768)
    assert not found["pixel_values"][0, 9:].any()
    assert found["image_position_ids"][0, 9:].unique().tolist() == [-1]
    assert found["image_position_ids"][1, 7].tolist() == [1, 1]  # column, row
    none = FAMILY.image_inputs(values[:0], grids[:0])
    assert (none["pixel_values"].shape, none["image_position_ids"].shape) == ((0, 0, 768), (0, 0, 2))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    folder = write_tokenizer(tmp_path_factory.mktemp("gemma4") / "tokenizer")
    return Encoder(PreprocessConfig(family="gemma4"), load_tokenizer(folder, None, "gemma4"))


def said(role: str, text: str, **more: Any) -> Message:
    return Message(role, (TextPart(text),), **more)


TOOL = {"type": "function", "function": {"name": "look", "description": "Looks at a place."}}


def test_tools_and_thinking_are_written_as_the_template_does(encoder: Encoder) -> None:
    talk = Conversation(
        (said("system", "See."), said("user", "Where?"), said("assistant", "Here.")),
        tools=(TOOL,),
        template_arguments={"enable_thinking": True},
    )
    sample, hf = encoder.encode(talk), encoder.tokenizer.hf
    messages = [{"role": message.role, "content": message.text} for message in talk.messages]
    wanted = processor(hf, 280).apply_chat_template(
        messages, tools=[TOOL], enable_thinking=True, tokenize=True, return_dict=True
    )
    assert sample.input_ids[: sample.length].tolist() == wanted["input_ids"][0]
    learned = sample.input_ids[: sample.length][sample.loss_mask[: sample.length] == 1]
    assert hf.decode(learned) == "Here.<turn|>\n"


def test_reasoning_that_the_template_drops_is_counted(encoder: Encoder) -> None:
    talk = Conversation(
        (said("user", "Where?"), said("assistant", "Here.", reasoning="Look around.")),
    )
    assert encoder.encode(talk).dropped_reasoning == 1


def call(id: str, name: str = "look") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": {"place": "here"}}}


#: A question; two calls at once, whose responses come in another order; a call of its own; the answer.
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": "", "tool_calls": [call("a"), call("b", "ask")]},
    {"role": "tool", "content": "nobody", "tool_call_id": "b"},
    {"role": "tool", "content": "dark", "tool_call_id": "a"},
    {"role": "assistant", "content": "", "tool_calls": [call("c")], "reasoning_content": "Again."},
    {"role": "tool", "content": "light", "tool_call_id": "c"},
    {"role": "assistant", "content": "There."},
]


def runs(sample: Any, encoder: Encoder) -> list[str]:
    """Texts of the tokens that are learned."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], sample.loss_mask[: sample.length], [0]]).astype(np.int8)))
    return [encoder.tokenizer.hf.decode(sample.input_ids[a:b]) for a, b in edges.reshape(-1, 2)]


def test_calls_are_learned_and_responses_are_not(encoder: Encoder) -> None:
    sample = encoder.encode(load_recipe("chat")(Row(0, {"messages": TALK})))
    wanted = processor(encoder.tokenizer.hf, 280).apply_chat_template(TALK, tokenize=True, return_dict=True)
    assert sample.input_ids[: sample.length].tolist() == wanted["input_ids"][0]
    text = encoder.tokenizer.hf.decode(sample.input_ids)
    response = '<|tool_response>response:ask{value:<|"|>nobody<|"|>}<tool_response|>'
    assert response + response.replace("ask", "look").replace("nobody", "dark") in text
    look = '<|tool_call>call:look{place:<|"|>here<|"|>}<tool_call|>'
    assert runs(sample, encoder) == [
        look + look.replace("look", "ask") + "<|tool_response>",
        f"<|channel>thought\nAgain.\n<channel|>{look}<|tool_response>",
        "There.<turn|>\n",
    ]


@pytest.mark.parametrize("turns", list(TrainTurns))
def test_a_dataset_of_calls_is_sound(tmp_path: Path, turns: TrainTurns) -> None:
    """Conversations that end with an answer, a call, or a response; and one whose first call is not learned."""
    unlearned = [TALK[0], {**TALK[1], "weight": 0}, *TALK[2:]]
    rows = [{"messages": each} for each in (TALK, TALK[:2], TALK[:5], TALK[:6], TALK[:4] + TALK, unlearned)]
    options = {
        "family": "gemma4",
        "tokenizer": write_tokenizer(tmp_path / "tokenizer"),
        "train_turns": turns,
        "image": ImageConfig(),
    }
    made = build_dataset(write_jsonl(tmp_path / "rows.jsonl", rows), tmp_path / "out", recipe="chat", **options)
    assert verify_dataset(made).faults == []
    assert describe_dataset(vlmdata.open_dataset(made)).findings == ()
    whole = describe_sample(vlmdata.open_dataset(made), 2 if turns is TrainTurns.EACH else 0)
    said = ["", "user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert [turn.role for turn in whole.turns] == said
    assert [bool(turn.targets) for turn in whole.turns if turn.role != "assistant"] == [False] * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {1: {"content": "Let me see."}},
            r"wrote '<\|tool_call>.* as assistant turn 1; the message says 'Let me see\.'",
        ),
        (
            {2: {"tool_call_id": "z"}},
            r"message 3 has tool_call_id 'z', which is the id of no call before it, or of sev",
        ),
        ({2: {"tool_call_id": None}}, r"message 3 has tool_call_id None, .* Give each call an id, and each response"),
        ({4: {"tool_calls": None, "content": "So."}}, r"message 6 has tool_call_id 'c', which is the id of no call"),
    ],
)
def test_what_the_template_would_write_wrong_is_rejected(
    encoder: Encoder, changes: dict[int, dict[str, Any]], message: str
) -> None:
    talk = [turn | changes.get(number, {}) for number, turn in enumerate(TALK)]
    with pytest.raises(RowRejected, match=message):
        encoder.encode(load_recipe("chat")(Row(0, {"messages": talk})))
