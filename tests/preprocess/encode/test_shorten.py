"""A sample that `--overlong` shortened is the sample of the shorter conversation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.chat_rows import image_item, turn, write_jsonl
from tests.conftest import build_dataset, encoded_image, tree_bytes
from vlmdata import open_dataset
from vlmdata.families import family
from vlmdata.preprocess.config import ImageConfig, Overlong, PreprocessConfig, TrainTurns
from vlmdata.preprocess.conversation import Conversation, Document, ImagePart, Message, TextPart
from vlmdata.preprocess.encode import EncodedSample, Encoder
from vlmdata.preprocess.encode.shorten import encode_shortened
from vlmdata.preprocess.recipes.base import Candidate
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.shards.job import encoded_candidates
from vlmdata.reasons import Reason
from vlmdata.verify.dataset import verify_dataset

DROP, SHRINK = Overlong.DROP_TURNS, Overlong.SHRINK_IMAGES
BOUNDS = ImageConfig(1024, 65_536)
PICTURES = [ImagePart(encoded_image(64 * n, 96 * n, seed=n)) for n in range(1, 5)]
EXCHANGE = st.tuples(st.lists(st.sampled_from(PICTURES), max_size=2), st.integers(1, 40))


def talk(system: bool, exchanges: list[tuple[list[ImagePart], int]]) -> Conversation:
    messages = [Message("system", (TextPart("Be brief."),))] if system else []
    for number, (images, words) in enumerate(exchanges):
        messages.append(Message("user", (*images, TextPart(f"Question {number}?"))))
        messages.append(Message("assistant", (TextPart(f"Answer {number}." + " word" * words),)))
    return Conversation(tuple(messages))


def length_of(tokenizer: Any, made: Conversation, **options: Any) -> int:
    return Encoder(PreprocessConfig(image=BOUNDS, max_length=1 << 20, **options), tokenizer).encode(made).length


def same(a: EncodedSample, b: EncodedSample) -> bool:
    arrays = [(getattr(a, name), getattr(b, name)) for name in ("input_ids", "loss_mask", "position_ids")]
    pixels = [(x.patches, y.patches) for x, y in zip(a.items, b.items, strict=True)]
    return all(np.array_equal(x, y) for x, y in arrays + pixels)


def only(outcomes: Any) -> EncodedSample:
    (sample,) = outcomes
    assert isinstance(sample, EncodedSample)
    return sample


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    system=st.booleans(),
    exchanges=st.lists(EXCHANGE, min_size=1, max_size=5),
    share=st.floats(0.1, 1.1),
    turns=st.sampled_from([TrainTurns.ALL, TrainTurns.LAST]),
)
def test_the_fewest_early_exchanges_are_dropped(
    tokenizer: Any, system: bool, exchanges: list[tuple[list[ImagePart], int]], share: float, turns: TrainTurns
) -> None:
    made, options = talk(system, exchanges), {"train_turns": turns}
    most = max(1, int(length_of(tokenizer, made, **options) * share))
    config = PreprocessConfig(image=BOUNDS, max_length=most, overlong=DROP, train_turns=turns)
    encoder = Encoder(config, tokenizer)
    pictures = any(images for images, _ in exchanges)
    shorter = [
        (n, talk(system, exchanges[n:]))
        for n in range(len(exchanges))
        if not pictures or any(i for i, _ in exchanges[n:])
    ]
    # Questions keep their numbers.
    shorter = [
        (n, replace(each, messages=(*made.messages[:system], *made.messages[system + 2 * n :]))) for n, each in shorter
    ]
    fitting = [(n, each) for n, each in shorter if length_of(tokenizer, each, **options) <= most]
    if not fitting:
        with pytest.raises(RowRejected) as caught:
            encode_shortened(made, encoder)
        assert caught.value.reason is Reason.OVERLONG
        return
    dropped, wanted = fitting[0]
    got, outcomes = encode_shortened(made, encoder)
    expected = Encoder(replace(config, overlong=Overlong.REJECT), tokenizer).encode(wanted)
    assert same(only(outcomes), expected)
    media = sum(len(images) for images, _ in exchanges[:dropped])
    took = {"dropped_turns": 2 * dropped, "dropped_images_and_videos": media} if dropped else {}
    assert got.shortened == only(outcomes).shortened == took


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    images=st.lists(st.sampled_from(PICTURES), min_size=1, max_size=3),
    share=st.floats(0.2, 1.1),
    floor=st.sampled_from([None, 4096, 16_384]),
    document=st.booleans(),
)
def test_images_shrink_as_little_as_possible(
    tokenizer: Any, images: list[ImagePart], share: float, floor: int | None, document: bool
) -> None:
    made: Conversation | Document = talk(True, [(images, 5)])
    if document:
        made = Document((*images, TextPart("words of a document")))

    def whole(made: Any, **options: Any) -> EncodedSample:
        return only(Encoder(PreprocessConfig(**{"image": BOUNDS, **options}), tokenizer).encode_all(made))

    full = whole(made).length
    most = max(1, int(full * share))
    config = PreprocessConfig(image=BOUNDS, max_length=most, overlong=SHRINK, overlong_min_pixels=floor)
    encoder = Encoder(config, tokenizer)
    least, fitting = floor or 1024, full <= most
    # A lower budget of the run does the same to images without an own one.
    if not fitting and whole(made, image=ImageConfig(1024, least)).length > most:
        with pytest.raises(RowRejected, match=f"of at most {least} pixels"):
            encode_shortened(made, encoder)
        return
    got, outcomes = encode_shortened(made, encoder)
    sample = only(outcomes)
    assert sample.length <= most
    if fitting:
        assert got.shortened == {}
        assert same(sample, whole(made))
        return
    budget = got.shortened["max_pixels"]
    assert budget >= least
    assert same(sample, whole(made, image=ImageConfig(1024, budget)))
    assert whole(made, image=ImageConfig(1024, min(65_536, budget + 1024))).length > most  # the largest that fits
    assert got.shortened["shrunk_images"] == sum(
        whole(made).items[n].size != sample.items[n].size for n in range(len(images))
    )


@pytest.mark.parametrize("name", ["gemma4", "internvl"])
def test_budgets_are_those_of_the_family(name: str) -> None:
    from vlmdata.preprocess.encode.shorten import _budgets

    rules = family(name)
    budgets = _budgets(rules, rules.min_pixels, rules.min_pixels, rules.max_pixels)
    assert budgets
    for each in budgets:
        rules.require_bounds(rules.min_pixels, each)
    if name == "gemma4":
        assert budgets == [140 * 48**2, 70 * 48**2]


def test_an_image_with_a_size_of_its_own_keeps_it(tokenizer: Any) -> None:
    sized = replace(PICTURES[3], resized_height=256, resized_width=256)
    config = PreprocessConfig(image=BOUNDS, max_length=60, overlong=SHRINK)
    with pytest.raises(RowRejected, match="of at most 1024 pixels"):
        encode_shortened(talk(False, [([sized], 3)]), Encoder(config, tokenizer))


def test_a_document_has_no_turns_to_drop(tokenizer: Any) -> None:
    config = PreprocessConfig(image=BOUNDS, max_length=5, overlong=DROP)
    with pytest.raises(RowRejected, match="a document has no turns to drop"):
        encode_shortened(Document((TextPart("word " * 40),)), Encoder(config, tokenizer))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overlong": DROP, "train_turns": TrainTurns.EACH}, "train_turns is each"),
        ({"overlong_min_pixels": 4096}, "no effect with overlong=reject"),
        ({"overlong": SHRINK, "overlong_min_pixels": 1}, "from min_pixels"),
    ],
)
def test_options_without_meaning_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PreprocessConfig(image=BOUNDS, **options)


def test_boxes_of_a_smaller_image_are_its_own(tokenizer: Any) -> None:
    """Coordinates in pixels are those of the shrunk image."""
    from vlmdata.preprocess.grounding import BoxPart

    answer = Message("assistant", (BoxPart((10, 20, 200, 120)),))
    made = Conversation((Message("user", (PICTURES[3], TextPart("Where?"))), answer))
    options: dict[str, Any] = {"family": "qwen2_5_vl", "image": ImageConfig(1024, 65_536)}
    full = Encoder(PreprocessConfig(**options), tokenizer).encode(made).length
    config = PreprocessConfig(**options, max_length=full - 20, overlong=SHRINK)
    got, outcomes = encode_shortened(made, Encoder(config, tokenizer))
    small = {**options, "image": ImageConfig(1024, got.shortened["max_pixels"])}
    assert same(only(outcomes), Encoder(PreprocessConfig(**small), tokenizer).encode(made))


@pytest.mark.parametrize("overlong", [DROP, SHRINK])
def test_nothing_is_silent(tmp_path: Path, overlong: Overlong) -> None:
    """Metadata, manifest and ledger tell what was shortened, and the shards are the same in any number of processes."""
    picture = image_item(seed=1, width=320, height=320)
    long = [turn("user", picture, "And?"), turn("assistant", "Noise.")] * 3
    rows = [{"messages": long}, {"messages": long[:2]}, {"messages": [long[0], turn("assistant", "word " * 400)]}]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    options: dict[str, Any] = {"recipe": "chat", "image": BOUNDS, "max_length": 100, "rows_per_shard": 1}
    out = build_dataset(source, tmp_path / "out", overlong=overlong, **options)
    assert verify_dataset(out).faults == []
    dataset = open_dataset(out)
    shortened = [dataset.metadata(i).get("shortened") for i in range(len(dataset))]
    if overlong is DROP:
        assert shortened == [{"dropped_turns": 4, "dropped_images_and_videos": 2}, None]
        assert dataset.manifest.turns == {"dropped_turns": 4, "rows_with_dropped_turns": 1}
    else:
        assert shortened[1] is None
        assert shortened[0]["shrunk_images"] == 3
        assert dataset.manifest.turns["rows_with_shrunk_images"] == 1
    assert dataset.manifest.rejects == {"overlong": 1}
    assert dataset.manifest.config["options"]["overlong"] == overlong.value
    again = build_dataset(source, tmp_path / "again", overlong=overlong, workers=2, **options)
    assert tree_bytes(again) == tree_bytes(out)


def test_the_conversation_that_was_encoded_is_stored(tokenizer: Any) -> None:
    config = PreprocessConfig(image=BOUNDS, max_length=60, overlong=DROP)
    made = talk(True, [([], 40), ([], 5)])
    (encoded,) = encoded_candidates([Candidate(made)], lambda row: made, Encoder(config, tokenizer))
    assert isinstance(encoded.made, Conversation)
    assert [message.role for message in encoded.made.messages] == ["system", "user", "assistant"]
