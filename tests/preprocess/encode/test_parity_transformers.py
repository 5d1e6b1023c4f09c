"""Samples against the authority: transformers' processor and position code, on the same rows."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from PIL import Image

from tests.chat_rows import write_jsonl
from tests.conftest import SHARED_DATA, encoded_image
from tests.families.reference import rope_index
from vlmdata.families import family
from vlmdata.families.qwen3_5 import FAMILY
from vlmdata.media.decode import decode_image
from vlmdata.preprocess.config import ImageConfig, PreprocessConfig
from vlmdata.preprocess.conversation import Conversation, ImagePart, Message, TextPart
from vlmdata.preprocess.encode import EncodedSample, Encoder
from vlmdata.preprocess.recipes.base import load_recipe
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.sources.open import open_source
from vlmdata.reasons import Reason

CHECKPOINT = ImageConfig(min_pixels=65_536, max_pixels=16_777_216)
CORD = ImageConfig(FAMILY.min_pixels, FAMILY.max_pixels)
SMALL = ImageConfig(min_pixels=1024, max_pixels=16_384)


def build_processor(tokenizer: Any, config: ImageConfig) -> Any:
    """Qwen3VLProcessor with the image settings of Qwen3.5 checkpoints."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    images = Qwen2VLImageProcessor(
        patch_size=16,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        size={"shortest_edge": config.min_pixels, "longest_edge": config.max_pixels},
    )
    assert images.backend == "torchvision"
    return Qwen3VLProcessor(images, tokenizer.hf, Qwen3VLVideoProcessor(), chat_template=tokenizer.hf.chat_template)


def processor_message(message: Message, max_source_pixels: int) -> dict[str, Any]:
    """A message in the processor's form; images normalised by us, since transformers gets several modes wrong."""
    content = []
    for part in message.parts:
        if isinstance(part, ImagePart):
            content.append(
                {"type": "image", "image": Image.fromarray(decode_image(part.data, max_source_pixels).pixels)}
            )
        else:
            content.append({"type": "text", "text": part.text})
    fields: dict[str, Any] = {"role": message.role, "content": content}
    if message.reasoning is not None:
        fields["reasoning_content"] = message.reasoning
    return fields


def reference(processor: Any, conversation: Conversation) -> Any:
    messages = [processor_message(m, ImageConfig().max_source_pixels) for m in conversation.messages]
    return processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")


def positions_of(outputs: Any, name: str) -> np.ndarray:
    """``get_rope_index`` of a family's model, int64 (3, L)."""
    positions = rope_index(name, outputs["input_ids"], outputs["mm_token_type_ids"], outputs.get("image_grid_thw"))
    return np.asarray(positions[:, 0])


def assert_equal(sample: EncodedSample, outputs: Any, name: str = FAMILY.name) -> None:
    n = sample.length
    assert sample.input_ids[:n].tolist() == outputs["input_ids"][0].tolist()
    if len(sample.items):
        assert sample.image_grid_thw.tolist() == outputs["image_grid_thw"].tolist()
        patches = torch.from_numpy(np.concatenate([image.patches for image in sample.items]))
        assert torch.equal(family(name).pixel_values(patches), outputs["pixel_values"])
    else:
        assert "pixel_values" not in outputs
    assert np.array_equal(sample.position_ids[:, :n], positions_of(outputs, name))


# --- random conversations -------------------------------------------------------------------------------------

plain_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
odd_text = st.sampled_from(
    [
        "",
        " ",
        "\n\n",
        "  leading",
        "trailing \n",
        "tab\tand\r\n",
        "a\u0301 combining",
        "\u0301first",
        "日本語",
        "👩‍👩‍👧",
        "1234567",
        "<b>",
        "ß|>",
    ]
)
texts = st.one_of(plain_text, odd_text, st.lists(st.one_of(plain_text, odd_text), max_size=4).map("".join))
images = st.builds(
    lambda w, h, seed: ImagePart(encoded_image(w, h, seed)), st.integers(8, 200), st.integers(8, 200), st.integers(0, 3)
)


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    messages = []
    if draw(st.booleans()):
        messages.append(Message("system", (TextPart(draw(texts)),)))
    left = draw(st.integers(0, 5))
    for _ in range(draw(st.integers(1, 3))):
        count = draw(st.integers(0, left))
        left -= count
        parts = [
            *draw(st.lists(images, min_size=count, max_size=count)),
            *map(TextPart, draw(st.lists(texts, max_size=3))),
        ]
        messages.append(Message("user", tuple(draw(st.permutations(parts)))))
        reasoning = draw(st.one_of(st.none(), texts))
        answer = draw(texts.filter(lambda t: t.strip() and "think>" not in t))
        messages.append(Message("assistant", (TextPart(answer),), reasoning))
    return Conversation(tuple(messages))


@pytest.fixture(scope="module")
def small_processor(tokenizer: Any) -> Any:
    return build_processor(tokenizer, SMALL)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(conversation=conversations())
def test_random_conversations_equal_the_processor(
    conversation: Conversation, tokenizer: Any, small_processor: Any
) -> None:
    try:
        sample = Encoder(PreprocessConfig(image=SMALL), tokenizer).encode(conversation)
    except RowRejected as rejected:
        # Hypothesis draws strings of our code, too, special tokens among them.
        if rejected.reason is not Reason.SPECIAL_TOKEN_TEXT:
            raise
        reject()
    assert_equal(sample, reference(small_processor, conversation))


def test_two_images_with_no_token_between_them_stay_two(tokenizer: Any) -> None:
    """Their markers alone stand between them; see test_positions for runs that touch."""
    parts = (ImagePart(encoded_image(64, 96)), ImagePart(encoded_image(96, 64, 1)), TextPart("compare"))
    conversation = Conversation((Message("user", parts), Message("assistant", (TextPart("different"),))))
    sample = Encoder(PreprocessConfig(image=SMALL), tokenizer).encode(conversation)
    assert_equal(sample, reference(build_processor(tokenizer, SMALL), conversation))


# --- real and drawn receipts ----------------------------------------------------------------------------------


def sources() -> list[Any]:
    real = [SHARED_DATA / name for name in ("cord_v2_real", "receipts_real")]
    return [
        pytest.param("demo", id="demo"),
        *(
            pytest.param(str(path), id=path.name, marks=pytest.mark.skipif(not path.exists(), reason=f"no {path}"))
            for path in real
        ),
    ]


@pytest.mark.parametrize("spec", sources())
@pytest.mark.parametrize("images", [CORD, CHECKPOINT], ids=["cord_bounds", "checkpoint_bounds"])
def test_receipts_equal_the_processor(spec: str, images: ImageConfig, tokenizer: Any) -> None:
    config = PreprocessConfig(image=images, max_length=100_000)
    source = open_source(spec, limit=4)
    recipe, encoder = load_recipe("cord_v2"), Encoder(config, tokenizer)
    processor = build_processor(tokenizer, images)
    for number in range(source.num_rows):
        conversation = recipe(source.row(number))
        assert_equal(encoder.encode(conversation), reference(processor, conversation))


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_vl"])
def test_demo_chats_equal_the_processor(tokenizer: Any, name: str) -> None:
    """Of both families whose processor is Qwen3VLProcessor."""
    config = PreprocessConfig(recipe="chat", image=SMALL, family=name)
    source = open_source("demo", recipe="chat", limit=16)
    recipe, encoder = load_recipe("chat"), Encoder(config, tokenizer)
    processor = build_processor(tokenizer, SMALL)
    seen_images = set()
    for number in range(source.num_rows):
        conversation = recipe(source.row(number))
        seen_images.add(len(conversation.images))
        assert_equal(encoder.encode(conversation), reference(processor, conversation), name)
    assert {0, 1, 2} <= seen_images  # or the comparison above compared less than it claims


def test_smart_resize_equals_transformers_over_many_sizes() -> None:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize as theirs

    ours = FAMILY.image_size

    rng = np.random.default_rng(0)
    sides = np.concatenate([rng.integers(1, 64, (500, 2)), rng.integers(1, 6000, (3000, 2)), [[864, 1296], [1, 200]]])
    compared = 0
    for height, width in sides.tolist():
        if max(height, width) / min(height, width) > 200:
            continue
        for config in (CORD, CHECKPOINT, SMALL):
            expected = theirs(height, width, 32, config.min_pixels, config.max_pixels)
            assert ours(height, width, config.min_pixels, config.max_pixels) == expected
            compared += 1
    assert compared > 5000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pixel_values_of_all_256_values_are_the_processors(dtype: torch.dtype, tokenizer: Any) -> None:
    """A ramp over every grey level, through the real processor and through our table."""
    ramp = np.arange(32 * 32 * 3, dtype=np.int64).astype(np.uint8).reshape(32, 32, 3)
    buffer = io.BytesIO()
    Image.fromarray(ramp).save(buffer, format="PNG")
    config = ImageConfig(min_pixels=1024, max_pixels=1024)
    conversation = Conversation(
        (Message("user", (ImagePart(buffer.getvalue()),)), Message("assistant", (TextPart("x"),)))
    )
    sample = Encoder(PreprocessConfig(image=config), tokenizer).encode(conversation)
    theirs = reference(build_processor(tokenizer, config), conversation)["pixel_values"]
    assert len(np.unique(sample.items[0].patches)) == 256
    assert torch.equal(FAMILY.pixel_values(torch.from_numpy(sample.items[0].patches), dtype), theirs.to(dtype))


def test_the_stored_shards_equal_the_processor_too(tokenizer: Any, tmp_path: Path) -> None:
    """End to end: what a reader gets from disk, not only what the encoder returned."""
    from vlmdata import open_dataset
    from vlmdata.preprocess.run.dataset import preprocess_dataset

    config = PreprocessConfig(image=SMALL, rows_per_shard=4)
    source = open_source("demo", limit=10)
    preprocess_dataset(source, tmp_path / "out", config, workers=1)
    dataset = open_dataset(tmp_path / "out")
    processor = build_processor(tokenizer, SMALL)
    recipe = load_recipe("cord_v2")
    assert len(dataset) == 10
    for number, sample in enumerate(dataset):
        outputs = reference(processor, recipe(source.row(number)))
        n = sample.length
        assert sample.input_ids[:n].tolist() == outputs["input_ids"][0].tolist()
        assert torch.equal(FAMILY.pixel_values(torch.from_numpy(sample.patches.copy())), outputs["pixel_values"])
        assert np.array_equal(sample.position_ids[:, :n], positions_of(outputs, FAMILY.name))


def test_nulls_of_tools_and_arguments_are_those_of_the_template(tokenizer: Any, tmp_path: Path) -> None:
    tools = [
        {
            "type": "function",
            "function": {"name": "crop", "parameters": {"type": "object", "default": None, "enum": ["a", None]}},
        }
    ]
    call = {
        "type": "function",
        "function": {"name": "crop", "arguments": {"box": None, "at": {"x": None, "y": [None]}}},
    }
    row = {
        "messages": [
            {"role": "user", "content": "Crop it."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "done"},
            {"role": "assistant", "content": "Here."},
        ],
        "tools": tools,
    }
    conversation = load_recipe("chat")(open_source(str(write_jsonl(tmp_path / "rows.jsonl", [row]))).row(0))
    sample = Encoder(PreprocessConfig(recipe="chat", image=SMALL), tokenizer).encode(conversation)
    text = tokenizer.hf.apply_chat_template(row["messages"], tools=tools, tokenize=False)
    assert text.count("null") >= 4
    assert sample.input_ids[: sample.length].tolist() == tokenizer.hf(text, add_special_tokens=False)["input_ids"]
