"""A family that shares nothing with Qwen's comes from one file: preprocess, verify, inspect and loader follow it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import vlmdata
from tests.chat_rows import mixed_rows, write_jsonl
from tests.conftest import build_dataset, encoded_image
from tests.families.gemma_files import TEMPLATE, processor, write_tokenizer
from tests.families.gemma_like import FAMILY, SIDE
from tests.inspect.browser import Visit, launched
from tests.inspect.serving import serving
from vlmdata import families
from vlmdata.errors import SourceError
from vlmdata.format.manifest import Manifest
from vlmdata.inspect.page.payload import sample_payload
from vlmdata.inspect.sample import SpanKind, describe_sample, rebuild_image
from vlmdata.inspect.serialise import to_jsonable
from vlmdata.media.decode import decode_image
from vlmdata.preprocess.chat.tokenizer import load_tokenizer
from vlmdata.preprocess.config import ImageConfig, PreprocessConfig, SpecialText
from vlmdata.preprocess.conversation import Conversation, Document, ImagePart, Message, TextPart
from vlmdata.preprocess.encode import EncodedSample, Encoder
from vlmdata.preprocess.encode.probe import require_usable
from vlmdata.verify.dataset import verify_dataset
from vlmdata.verify.sample import SampleRules, audit_sample

TOKENS = (SIDE // FAMILY.factor) ** 2
PICTURES = [ImagePart(encoded_image(width, height, seed=width)) for width, height in ((64, 64), (120, 50), (30, 90))]


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(families.REGISTRY, FAMILY.name, "tests.families.gemma_like:FAMILY")
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokenizer(tmp_path_factory.mktemp("gemma") / "tokenizer")


@pytest.fixture(scope="module")
def encoder(folder: str) -> Encoder:
    config = PreprocessConfig(family=FAMILY.name, special_text=SpecialText.PLAIN)
    return Encoder(config, load_tokenizer(folder, None, FAMILY.name))


@pytest.fixture(scope="module")
def built(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("built")
    source = write_jsonl(place / "rows.jsonl", mixed_rows())
    return build_dataset(
        source, place / "out", recipe="chat", family=FAMILY.name, tokenizer=folder, image=ImageConfig(), pad_multiple=8
    )


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
marks = st.sampled_from(["\n\n", " ", "<start_of_image>", "<end_of_turn>\n", "<start_of_turn>model\n", "<bos>"])
contents = st.lists(texts | marks | st.sampled_from(PICTURES), min_size=1, max_size=4)


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    messages = []
    if draw(st.booleans()):
        messages.append(Message("system", (TextPart(draw(texts)),)))
    for _ in range(draw(st.integers(1, 3))):
        parts = tuple(TextPart(part) if isinstance(part, str) else part for part in draw(contents))
        messages.append(Message("user", parts))
        messages.append(Message("assistant", (TextPart(draw(texts) + "." + draw(texts | marks)),)))
    return Conversation(tuple(messages))


def of_the_processor(encoder: Encoder, conversation: Conversation) -> Any:
    messages = []
    for message in conversation.messages:
        content = [
            {"type": "text", "text": part.text}
            if isinstance(part, TextPart)
            else {"type": "image", "image": Image.fromarray(decode_image(part.data, 1 << 20).pixels)}
            for part in message.parts
        ]
        # As rendered for us: texts alone are one string.
        # An empty one is a part: transformers 5.24 takes an empty string for no parts at all.
        texts = message.text or [{"type": "text", "text": ""}]
        messages.append({"role": message.role, "content": content if any(message.images) else texts})
    made = processor(encoder.tokenizer.hf)
    return made.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")


def spoken(conversation: Conversation) -> str:
    return "".join(message.text for message in conversation.messages)


@settings(max_examples=60)
@given(conversations())
def test_samples_equal_those_of_transformers_processor(encoder: Encoder, conversation: Conversation) -> None:
    sample = encoder.encode(conversation)
    n = sample.length
    images = [image for message in conversation.messages for image in message.images]
    assert len(sample.items) == len(images)
    assert (sample.input_ids == encoder.tokenizer.info.image).sum() == TOKENS * len(images)
    assert sample.position_ids.tolist() == [[*range(n), *[0] * (len(sample.input_ids) - n)]]
    if any(mark in spoken(conversation) for mark in encoder.tokenizer.specials):
        return  # the processor takes them for its own
    wanted = of_the_processor(encoder, conversation)
    assert sample.input_ids[:n].tolist() == wanted["input_ids"][0].tolist()
    if images:
        patches = np.concatenate([image.patches for image in sample.items])
        values = FAMILY.pixel_values(torch.from_numpy(patches)).view(len(images), 3, 3, 3, 3, 3, 8, 8)
        pixels = values.permute(0, 5, 1, 3, 6, 2, 4, 7).reshape(len(images), 3, SIDE, SIDE)
        assert torch.equal(pixels, wanted["pixel_values"])


@settings(max_examples=60)
@given(conversations())
def test_answers_with_their_ends_are_learned_and_nothing_else(encoder: Encoder, conversation: Conversation) -> None:
    sample = encoder.encode(conversation)
    n, hf = sample.length, encoder.tokenizer.hf
    edges = np.flatnonzero(np.diff(np.concatenate([[0], sample.loss_mask[:n], [0]]).astype(np.int8)))
    runs = [hf.decode(sample.input_ids[a:b]) for a, b in edges.reshape(-1, 2)]
    assert runs == [message.text.strip() + "<end_of_turn>\n" for message in conversation.answers]


def test_documents_begin_with_the_beginning_and_end_with_the_end(encoder: Encoder) -> None:
    (sample,) = encoder.encode_all(Document((TextPart("Before"), PICTURES[0], TextPart("after."))))
    assert isinstance(sample, EncodedSample)
    ids, spell = sample.input_ids[: sample.length], encoder.tokenizer.hf.decode
    image = f"\n\n<start_of_image>{'<image_soft_token>' * TOKENS}<end_of_image>\n\n"
    assert spell(ids) == f"<bos>Before{image}after.<eos>"
    assert spell(ids[sample.loss_mask[: sample.length] == 1]) == "Before\n\n\n\nafter.<eos>"


@pytest.mark.parametrize(
    ("template", "message"),
    {
        "no beginning": (TEMPLATE.replace("{{ bos_token }}", ""), "wrote <bos> 0 times; the text must begin with one"),
        "beginning twice": (TEMPLATE + "{{ bos_token }}", "wrote <bos> 2 times"),
        "images written whole": (
            TEMPLATE.replace("'<start_of_image>'", "'<start_of_image><image_soft_token><end_of_image>'"),
            "wrote 6 image placeholders for 3 images",
        ),
        "no turns": (TEMPLATE.replace("<start_of_turn>", ""), "turns must have the form <start_of_turn>role … <end"),
        "another role": (
            TEMPLATE.replace('"model"', '"assistant"'),
            "wrote 0 assistant turns for 2",
        ),
    }.values(),
)
def test_a_template_of_another_form_is_refused(tmp_path: Path, template: str, message: str) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "tokenizer", template), None, FAMILY.name)
    with pytest.raises(SourceError, match=message):
        require_usable(tokenizer, PreprocessConfig(family=FAMILY.name))


def test_a_tokenizer_of_another_family_is_refused(folder: str) -> None:
    with pytest.raises(SourceError, match=r"no token <start_of_turn>, so it is not .* of the family gemma_like"):
        load_tokenizer(family_name=FAMILY.name)
    with pytest.raises(SourceError, match=r"no token <\|im_start\|>, so it is not a tokenizer of the family qwen3_5"):
        load_tokenizer(folder)


def test_a_dataset_is_sound_and_its_manifest_has_the_ids(built: Path, encoder: Encoder) -> None:
    assert verify_dataset(built).faults == []
    manifest, ids = Manifest.read(built), encoder.tokenizer.hf.convert_tokens_to_ids
    fields = json.loads(manifest.to_json())["tokenizer"]
    assert (fields["turns"]["start"], fields["turns"]["begin"]) == (ids("<start_of_turn>"), ids("<bos>"))
    assert fields["items"] == {
        "image": {
            "before": [ids("<start_of_image>")],
            "token": ids("<image_soft_token>"),
            "after": [ids("<end_of_image>")],
        }
    }
    assert manifest.tokenizer == encoder.tokenizer.info
    processor = manifest.config["fingerprints"]["processor"]
    assert (processor["merge_size"], processor["resize"]) == (3, "torchvision bilinear antialias uint8")


def audited(dataset: vlmdata.VlmDataset, i: int, **changes: Any) -> set[str]:
    sample, rules = dataset[i], SampleRules.of(dataset.manifest)
    return {check for check, _ in audit_sample(dataclasses.replace(sample, **changes), dataset.index.row(i), rules)}


@pytest.mark.parametrize(
    ("text", "checks"),
    {
        "the beginning is lost": ("<bos>", {"begin_token"}),
        "an image's mark is lost": ("<start_of_image>", {"image_block"}),
        "an image's end is lost": ("<end_of_image>", {"image_block"}),
        "a placeholder is lost": ("<image_soft_token>", {"image_block"}),
    }.values(),
)
def test_the_audit_knows_the_marks(built: Path, encoder: Encoder, text: str, checks: set[str]) -> None:
    dataset = vlmdata.open_dataset(built)
    ids = dataset[0].input_ids.copy()
    ids[np.flatnonzero(ids == encoder.tokenizer.hf.convert_tokens_to_ids(text))[0]] = 0
    assert audited(dataset, 0) == set()
    assert audited(dataset, 0, input_ids=ids) == checks


def test_the_audit_knows_targets_and_positions(built: Path) -> None:
    dataset = vlmdata.open_dataset(built)
    sample = dataset[0]
    mask, positions = sample.loss_mask.copy(), sample.position_ids.copy()
    mask[mask.argmax() - 1] = 1
    positions[0, 3] = 7
    assert audited(dataset, 0, loss_mask=mask) == {"header_target", "index"}
    assert audited(dataset, 0, position_ids=positions) == {"positions"}


@pytest.mark.parametrize("context_parallel", [1, 2])
def test_batches_have_its_positions_and_pixels(built: Path, context_parallel: int) -> None:
    dataset, options = vlmdata.open_dataset(built), {"capacity": 128, "global_batch": 1, "num_workers": 0}
    with vlmdata.StreamingLoader(built, context_parallel=context_parallel, **options) as loader:
        batches = list(loader)
    assert sum(batch.num_samples for batch in batches) == len(dataset)
    for batch in batches:
        samples = [dataset.sample(key) for key in batch.sample_keys]
        positions = batch.position_ids
        assert positions.shape == (1, 1, batch.total_tokens)
        for sample, start in zip(samples, batch.cu_seqlens_padded.tolist(), strict=False):
            assert positions[0, 0, start : start + sample.length].tolist() == list(range(sample.length))
        if context_parallel == 1:
            stored = torch.from_numpy(np.concatenate([sample.patches for sample in samples]))
            assert torch.equal(batch.pixel_values(), FAMILY.pixel_values(stored))


def test_inspect_shows_turns_images_and_positions(built: Path) -> None:
    dataset = vlmdata.open_dataset(built)
    sample = describe_sample(dataset, 0)
    assert [turn.role for turn in sample.turns] == ["", "user", "assistant"]
    assert [span.text for span in sample.spans if span.target] == ["Noise, nothing more.", "<end_of_turn>", "\n"]
    assert list(sample.tokens.positions) == ["position"]
    (image,) = sample.images
    assert (image.merge, image.grid, image.tokens) == (3, (1, 9, 9), TOKENS)
    (span,) = [span for span in sample.spans if span.kind is SpanKind.IMAGE]
    assert (span.start, span.stop) == (image.start, image.start + TOKENS)
    shown, again = sample_payload(sample), to_jsonable(sample)
    assert shown["tokens"]["axes"] == ["position"]
    assert shown["tokens"]["position"] == again["tokens"]["position"] == list(range(sample.length))
    assert rebuild_image(dataset[0], 0, dataset.family).shape == (SIDE, SIDE, 3)


@pytest.mark.parametrize("codec", ["zstd", "source"])
def test_codecs_keep_its_pixels(built: Path, tmp_path: Path, codec: str) -> None:
    """The file is resized with the family's filter at each read."""
    source = write_jsonl(tmp_path / "rows.jsonl", mixed_rows())
    folder = Manifest.read(built).tokenizer.name
    made = build_dataset(
        source, tmp_path / "out", recipe="chat", family=FAMILY.name, tokenizer=folder, image=ImageConfig(), pixels=codec
    )
    assert verify_dataset(made).faults == []
    for mine, theirs in zip(vlmdata.open_dataset(made), vlmdata.open_dataset(built), strict=True):
        assert np.array_equal(mine.patches, theirs.patches)


@pytest.mark.slow
def test_the_page_marks_a_token_of_three_by_three_patches(built: Path) -> None:
    with launched() as browser, serving(built) as client:
        visit = Visit(browser, client.home)
        visit.open_sample(0)
        start = describe_sample(vlmdata.open_dataset(built), 0).images[0].start
        visit.page.keyboard.press("u")
        visit.page.hover(f".cell[data-i='{start + 5}']")  # the last token of the second row
        marked = visit.page.locator(".spot")
        assert [marked.get_attribute(name) for name in ("x", "y", "width", "height")] == ["6", "3", "3", "3"]
        assert visit.field("position") == f"{start + 5}"
        assert visit.field("image") == "0, patch rows 3–5, columns 6–8"
        assert visit.page.locator(".plot path").count() == 1
        assert visit.complaints == []
