"""Conversations with images and videos against transformers' processors: ids, pixels and positions, bit for bit."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.conftest import encoded_image
from tests.families.reference import FAMILIES, image_processor, rope_index
from tests.media.video.clips import clip
from vlmdata.families import family
from vlmdata.families.chat import IMAGE, VIDEO
from vlmdata.media.decode import decode_image
from vlmdata.media.video import read_contents, sample_video
from vlmdata.preprocess.chat.tokenizer import load_tokenizer
from vlmdata.preprocess.config import EMBEDDED, DamagedVideos, ImageConfig, PreprocessConfig, TrainTurns, VideoConfig
from vlmdata.preprocess.conversation import Conversation, ImagePart, Message, TextPart, VideoPart
from vlmdata.preprocess.encode import EncodedSample, Encoder
from vlmdata.preprocess.reject import RowRejected
from vlmdata.reasons import Reason

IMAGES = {"qwen2_5_vl": (3136, 20_000)}
BOUNDS = {"qwen2_5_vl": (3136, 9_000)}
LEAST_AND_MOST = (4096, 40_000)


@cache
def encoder(name: str, **options: Any) -> Encoder:
    least, most = BOUNDS.get(name, LEAST_AND_MOST)
    config = PreprocessConfig(
        family=name,
        image=ImageConfig(*IMAGES.get(name, LEAST_AND_MOST)),
        video=VideoConfig(min_pixels=least, max_pixels=most),
        max_length=1 << 20,
    )
    return Encoder(dataclasses.replace(config, **options), load_tokenizer(EMBEDDED, None, name))


@cache
def processor(name: str) -> Any:
    from transformers import Qwen2_5_VLProcessor, Qwen2VLVideoProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    hf = encoder(name).tokenizer.hf
    images = image_processor(name, *IMAGES.get(name, LEAST_AND_MOST))
    least, most = BOUNDS.get(name, LEAST_AND_MOST)
    size = {"shortest_edge": least, "longest_edge": most}
    if name == "qwen2_5_vl":
        videos = Qwen2VLVideoProcessor(do_sample_frames=True, fps=2, size=size)
        return Qwen2_5_VLProcessor(images, hf, videos, chat_template=hf.chat_template)
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return Qwen3VLProcessor(images, hf, Qwen3VLVideoProcessor(size=size, **half), chat_template=hf.chat_template)


@cache
def clip_of(count: int, rate: int, height: int, width: int) -> VideoPart:
    random = np.random.default_rng(count)
    frames = [random.integers(0, 256, (height, width, 3), np.uint8) for _ in range(count)]
    return VideoPart(clip("ffv1", count, rate, (height, width), frames=frames, pixels="yuv444p"))


CLIPS = [clip_of(2, 10, 40, 64), clip_of(30, 10, 48, 48), clip_of(23, 4, 70, 34), clip_of(9, 1, 40, 90)]
PICTURES = [ImagePart(encoded_image(width, height, seed=width)) for width, height in ((64, 64), (150, 40))]


def frames_of(data: bytes) -> tuple[np.ndarray, dict[str, Any]]:
    """All frames of a file, and what the processor is told of it."""
    contents, frames = read_contents(data), []
    sample_video(data, lambda c: np.arange(len(c)), lambda *_: lambda _, pixels: frames.append(pixels))
    return np.stack(frames), {"fps": float(contents.rate), "total_num_frames": len(contents)}


def of_the_processor(name: str, conversation: Conversation) -> Any:
    kinds = {ImagePart: "image", VideoPart: "video"}
    messages = [
        {
            "role": message.role,
            "content": [
                {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": kinds[type(part)]}
                for part in message.parts
            ]
            if any(message.media)
            else message.text,
        }
        for message in conversation.messages
    ]
    text = processor(name).apply_chat_template(messages, tokenize=False)
    videos = [frames_of(part.data) for part in conversation.media if isinstance(part, VideoPart)]
    given: dict[str, Any] = {}
    if videos:
        given = {"videos": [each for each, _ in videos], "video_metadata": [facts for _, facts in videos]}
    if pictures := [Image.fromarray(decode_image(part.data, 1 << 20).pixels) for part in conversation.images]:
        given["images"] = pictures
    return processor(name)(text=[text], **given, return_tensors="pt")


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<|"), max_size=20)
contents = st.lists(texts | st.sampled_from(CLIPS) | st.sampled_from(PICTURES), min_size=1, max_size=4)


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    messages = []
    for _ in range(draw(st.integers(1, 2))):
        parts = tuple(TextPart(part) if isinstance(part, str) else part for part in draw(contents))
        messages.append(Message("user", parts))
        messages.append(Message("assistant", (TextPart(draw(texts) + "."),)))
    return Conversation(tuple(messages))


def assert_equal(sample: EncodedSample, wanted: Any, name: str) -> None:
    made, n = family(name), sample.length
    assert sample.input_ids[:n].tolist() == wanted["input_ids"][0].tolist()
    names = ((IMAGE, "pixel_values", "image_grid_thw"), (VIDEO, "pixel_values_videos", "video_grid_thw"))
    for kind, pixels, grids in names:
        items = [item for item in sample.items if item.kind == kind]
        if not items:
            assert pixels not in wanted
            continue
        assert [list(item.grid) for item in items] == wanted[grids].tolist()
        values = [made.pixel_values(torch.from_numpy(item.patches), copies=item.copies) for item in items]
        assert torch.equal(torch.cat(values), wanted[pixels])
    positions = rope_index(
        name,
        wanted["input_ids"],
        wanted["mm_token_type_ids"],
        wanted.get("image_grid_thw"),
        wanted.get("video_grid_thw"),
        None if wanted.get("second_per_grid_ts") is None else torch.as_tensor(wanted["second_per_grid_ts"]),
    )
    assert np.array_equal(sample.position_ids[:, :n], positions[:, 0])


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=40)
@given(conversation=conversations())
def test_samples_with_videos_equal_those_of_transformers(name: str, conversation: Conversation) -> None:
    assert_equal(encoder(name).encode(conversation), of_the_processor(name, conversation), name)


def talk(*parts: Any) -> Conversation:
    return Conversation((Message("user", parts), Message("assistant", (TextPart("Yes."),))))


def test_the_text_tells_the_time_of_each_patch() -> None:
    sample = encoder("qwen3_5").encode(talk(TextPart("Look: "), CLIPS[1], TextPart(" What is it?")))
    hf = encoder("qwen3_5").tokenizer.hf
    shown = hf.decode(sample.input_ids[: sample.length]).replace("<|video_pad|>", "")
    inner = "<|vision_start|><|vision_end|>"
    expected = f"Look: <|vision_start|><0.3 seconds>{inner}<1.4 seconds>{inner}<2.6 seconds>{inner}<|vision_end|> What"
    assert expected in shown, shown


def test_a_video_used_twice_is_decoded_once() -> None:
    sample = encoder("qwen3_5").encode(talk(CLIPS[1], CLIPS[1], dataclasses.replace(CLIPS[1], fps=1.0)))
    assert sample.items[0] is sample.items[1]
    assert sample.items[0].grid != sample.items[2].grid


def test_the_same_frames_at_another_rate_have_other_times() -> None:
    files = tuple(encoded_image(64, 48, seed=n) for n in range(4))
    slow, fast = encoder("qwen2_5_vl").encode(talk(VideoPart(files, rate=0.5), VideoPart(files, rate=2.0))).items
    assert np.array_equal(slow.patches, fast.patches)
    assert (slow.origin["seconds"], fast.origin["seconds"]) == ([0, 2, 4, 6], [0, 0.5, 1, 1.5])
    assert (slow.step, fast.step) == (8, 2)


@pytest.mark.parametrize("name", FAMILIES)
def test_settings_of_the_data(name: str) -> None:
    video = clip_of(30, 10, 48, 48)

    def numbers(**asked: Any) -> list[int]:
        (item,) = encoder(name).encode(talk(dataclasses.replace(video, **asked))).items
        return list(item.origin["frames"])

    assert len(numbers(fps=4.0)) == 12
    assert len(numbers(num_frames=6)) == 6
    assert len(numbers(max_frames=2)) == 2 if name == "qwen2_5_vl" else 4
    window = numbers(start=1.0, end=1.95, fps=10.0)
    assert (window[0], len(window)) == (10, 10)
    with pytest.raises(RowRejected, match="video_frames: video: no frame from video_start 3 s to video_end the end"):
        numbers(start=3.0)
    (small,) = encoder(name).encode(talk(dataclasses.replace(video, max_pixels=1_600))).items
    assert small.size[0] * small.size[1] <= 1_600


def test_frames_of_a_video_in_the_data_are_all_used() -> None:
    files = tuple(encoded_image(64, 48, seed=n) for n in range(5))
    (item,) = encoder("qwen3_5").encode(talk(VideoPart(files, rate=2.0))).items
    assert item.grid[0] == 3
    assert item.origin["seconds"] == [0, 0.5, 1, 1.5, 2]
    frames = np.stack([decode_image(file, 1 << 20).pixels for file in files])
    least, most = LEAST_AND_MOST
    wanted = processor("qwen3_5").video_processor(
        [frames], do_sample_frames=False, size={"shortest_edge": least, "longest_edge": most}, return_tensors="pt"
    )
    values = family("qwen3_5").pixel_values(torch.from_numpy(item.patches), copies=2)
    assert torch.equal(values, wanted["pixel_values_videos"])
    mixed = (*files, encoded_image(20, 48))
    with pytest.raises(RowRejected, match=r"video\[5\]: 20x48 pixels, but the first frame has 64x48"):
        encoder("qwen3_5").encode(talk(VideoPart(mixed, rate=2.0)))


@pytest.mark.parametrize("name", FAMILIES)
def test_frames_with_timestamps_equal_transformers_at_these_times(name: str) -> None:
    """A second as the unit of frames, so that the processor's indices are the times."""
    files, times = tuple(encoded_image(64, 48, seed=n) for n in range(5)), (1.25, 2.0, 7.5, 7.75, 30.0)
    conversation = talk(VideoPart(files, timestamps=times))
    frames = np.stack([decode_image(file, 1 << 20).pixels for file in files])
    text = processor(name).apply_chat_template(
        [{"role": "user", "content": [{"type": "video"}]}, {"role": "assistant", "content": "Yes."}], tokenize=False
    )
    mean = 4 / (times[-1] - times[0])  # all that the processor of qwen2_5_vl knows of times
    known = {"fps": mean} if name == "qwen2_5_vl" else {"fps": 1.0, "frames_indices": list(times)}
    facts = {"total_num_frames": 5, "frames_indices": list(range(5))} | known
    wanted = processor(name)(
        text=[text], videos=[frames], video_metadata=[facts], do_sample_frames=False, return_tensors="pt"
    )
    sample = encoder(name).encode(conversation)
    assert_equal(sample, wanted, name)
    assert sample.items[0].origin["seconds"] == list(times)
    assert sample.items[0].origin["patch_seconds"] == [1.625, 7.625, 30.0]


def test_frames_with_timestamps_are_sampled_by_them_if_asked() -> None:
    files = tuple(encoded_image(64, 48, seed=n) for n in range(8))
    even = VideoPart(files, timestamps=tuple(3 + n / 4 for n in range(8)))
    late = VideoPart(files, timestamps=(0.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 14.0))

    def used(part: VideoPart, **asked: Any) -> list[int]:
        (item,) = encoder("qwen3_5").encode(talk(dataclasses.replace(part, **asked))).items
        assert part.timestamps is not None
        assert item.origin["seconds"] == [part.timestamps[number] for number in item.origin["frames"]]
        return list(item.origin["frames"])

    assert used(even) == used(even, fps=4.0) == list(range(8))
    assert used(even, fps=2.0) == used(even, num_frames=4) == [0, 2, 5, 7]
    assert used(even, start=3.5, end=4.25) == [2, 3, 4, 5]
    assert used(even, start=4.7) == [7, 7]
    assert used(late, num_frames=4) == [0, 4, 6, 7]  # at 0, 4, 10 and 14 s
    thirds = tuple(round(n / 3, 2) for n in range(8))  # an even rate in two decimals
    assert used(VideoPart(files, timestamps=thirds), num_frames=8) == list(range(8))
    with pytest.raises(RowRejected, match=r"video_frames: video: no frame from video_start 5 s to video_end the end; "):
        used(even, start=5.0)


def test_a_video_of_one_frame() -> None:
    (item,) = encoder("qwen3_5").encode(talk(VideoPart(clip("libx264", 1)))).items
    assert item.grid[0] == 1
    assert item.origin["frames"] == [0, 0]
    assert np.array_equal(item.patches[::2], item.patches[1::2])


def test_a_damaged_video_is_refused_or_kept_and_recorded() -> None:
    random = np.random.default_rng(0)
    frames = [random.integers(0, 256, (48, 64, 3), np.uint8) for _ in range(60)]
    whole = clip("libx264", 60, 10, frames=frames, container="matroska", options={"g": "10"})
    damaged = VideoPart(whole[: len(whole) // 2])
    with pytest.raises(RowRejected, match="bytes are missing") as caught:
        encoder("qwen3_5").encode(talk(damaged))
    assert caught.value.reason is Reason.DAMAGED_VIDEO
    keep = Encoder(
        dataclasses.replace(encoder("qwen3_5").config, video=VideoConfig(damaged=DamagedVideos.KEEP)),
        encoder("qwen3_5").tokenizer,
    )
    (item,) = keep.encode(talk(damaged)).items
    assert "bytes are missing" in item.origin["damage"]
    assert max(item.origin["frames"]) < item.origin["file_frames"] < 60


def test_a_sample_that_is_too_long_is_rejected_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    short = Encoder(dataclasses.replace(encoder("qwen3_5").config, max_length=30), encoder("qwen3_5").tokenizer)

    def refuse(*_: Any) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr("vlmdata.preprocess.encode.items.encode_video", refuse)
    with pytest.raises(RowRejected, match=r"overlong: \d+ tokens"):
        short.encode(talk(CLIPS[1]))


def test_each_turn_shares_the_video() -> None:
    config = dataclasses.replace(encoder("qwen3_5").config, train_turns=TrainTurns.EACH)
    each = Encoder(config, encoder("qwen3_5").tokenizer)
    turns = (*talk(CLIPS[1]).messages, *talk(TextPart("More?")).messages)
    one, two = each._encode_each(Conversation(turns))
    assert isinstance(one, EncodedSample)
    assert isinstance(two, EncodedSample)
    assert one.items[0] is two.items[0]
    assert two.length > one.length


def test_text_that_spells_a_placeholder_is_no_video() -> None:
    with pytest.raises(RowRejected, match=r"spells the special token <\|video_pad\|>"):
        encoder("qwen3_5").encode(talk(CLIPS[0], TextPart("<|video_pad|>")))
