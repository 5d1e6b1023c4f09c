"""Gemma 4's budgets, values, tools and reasoning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from preprocess.chat.tokenizer import load_tokenizer
from preprocess.config import ImageConfig, PreprocessConfig
from preprocess.conversation import Conversation, ImagePart, Message, TextPart
from preprocess.encode import Encoder, encode_image
from preprocess.reject import RowRejected
from tests.conftest import encoded_image
from tests.families.gemma4_files import processor, write_tokenizer
from tests.families.reference import TOKEN
from vlmdata.errors import UsageError
from vlmdata.families.gemma4 import BUDGETS, FAMILY

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
CALL = {"name": "look", "arguments": {"place": "here", "near": True}}


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


@pytest.mark.parametrize("answered", [True, False])
def test_calls_of_tools_are_refused(encoder: Encoder, answered: bool) -> None:
    """Calls, responses and the answer are one turn in the template, of which the response must not be learned."""
    called = said("user", "Where?"), said("assistant", "", tool_calls=(CALL,))
    rest = (said("tool", "there"), said("assistant", "There.")) if answered else ()
    with pytest.raises(RowRejected, match=r"template wrote .* calls tools, .* as one turn.* Drop rows with tool_calls"):
        encoder.encode(Conversation((*called, *rest), tools=(TOOL,)))
