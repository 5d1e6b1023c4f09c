"""The text around videos in the layout of vLLM, against prompts put together as vLLM does: from tokens of pieces."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from tests.chat_rows import write_jsonl
from tests.families.reference import rope_index
from tests.preprocess.encode.test_videos import (
    CLIPS,
    LEAST_AND_MOST,
    PICTURES,
    conversations,
    encoder,
    of_the_processor,
    processor,
    talk,
)
from vlmdata import open_dataset
from vlmdata.errors import ConfigMismatchError, UsageError
from vlmdata.families import family
from vlmdata.preprocess.chat.render import Rendered
from vlmdata.preprocess.config import VideoConfig, VideoLayout, VideoSampler
from vlmdata.preprocess.conversation import Conversation, ImagePart, TextPart
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.run.dataset import preprocess_dataset
from vlmdata.preprocess.sources.open import open_source
from vlmdata.storage.join import join_datasets
from vlmdata.verify.dataset import verify_dataset
from vlmdata.verify.sample import SampleRules, audit_sample

VIDEOS = VideoConfig(*(None,) * 3, *LEAST_AND_MOST, layout=VideoLayout.VLLM)
NAMES = ("qwen3_5", "qwen3_vl")
#: What a prompt has where vLLM puts a video: it replaces all three tokens.
TARGET = "<|vision_start|><|video_pad|><|vision_end|>"


def of_vllm(name: str, conversation: Conversation) -> tuple[list[int], Any]:
    """The ids of a prompt, and what the processor of transformers makes of the same conversation."""
    wanted, hf = of_the_processor(name, conversation), encoder(name).tokenizer.hf
    told = re.findall(r"<\d+\.\d seconds>", hf.decode(wanted["input_ids"][0]))
    messages = [
        {
            "role": message.role,
            "content": message.text
            if not any(message.media)
            else [
                {"type": "text", "text": part.text}
                if isinstance(part, TextPart)
                else {"type": "image" if isinstance(part, ImagePart) else "video"}
                for part in message.parts
            ],
        }
        for message in conversation.messages
    ]
    text = processor(name).apply_chat_template(messages, tokenize=False)
    images = iter(wanted.get("image_grid_thw", np.zeros((0, 3), int)).tolist())
    text = re.sub(r"<\|image_pad\|>", lambda pad: pad[0] * (math.prod(next(images)) // 4), text)
    first, *others = text.split(TARGET)
    ids, mark = hf(first)["input_ids"], hf.convert_tokens_to_ids
    for grid, after in zip(wanted.get("video_grid_thw", []), others, strict=True):
        t, h, w = grid.tolist()
        for time in told[:t]:
            ids += hf(time)["input_ids"] + [mark("<|vision_start|>")]
            ids += [mark("<|video_pad|>")] * (h * w // 4) + [mark("<|vision_end|>")]
        del told[:t]
        ids += hf(after)["input_ids"] if after else []
    return ids, wanted


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40)
@given(conversation=conversations())
def test_prompts_are_those_of_vllm(name: str, conversation: Conversation) -> None:
    sample = encoder(name, video=VIDEOS).encode(conversation)
    ids, wanted = of_vllm(name, conversation)
    n = sample.length
    assert sample.input_ids[:n].tolist() == ids
    tensor, placeholders = torch.tensor([ids]), encoder(name).tokenizer.placeholders
    types = (tensor == placeholders["image"]).int() + 2 * (tensor == placeholders["video"]).int()
    positions = rope_index(name, tensor, types, wanted.get("image_grid_thw"), wanted.get("video_grid_thw"), None)
    assert np.array_equal(sample.position_ids[:, :n], positions[:, 0])


def test_a_time_does_not_merge_with_the_text_before_it() -> None:
    sample = encoder("qwen3_5", video=VIDEOS).encode(
        talk(TextPart("Look: "), CLIPS[1], TextPart(" What?"), PICTURES[0])
    )
    hf = encoder("qwen3_5").tokenizer.hf
    shown = hf.decode(sample.input_ids[: sample.length]).replace("<|video_pad|>", "")
    inner = "<|vision_start|><|vision_end|>"
    assert f"Look: <0.3 seconds>{inner}<1.4 seconds>{inner}<2.6 seconds>{inner} What?" in shown, shown
    begin = hf("<|im_start|>user\nLook: ")["input_ids"]
    assert sample.input_ids[: len(begin)].tolist() == begin


def test_a_template_without_marks_around_videos_has_no_such_layout() -> None:
    text = "<|im_start|>user\n<|vision_start|> <|video_pad|><|vision_end|><|im_end|>\n"
    spans = tuple(match.span() for match in re.finditer(r"<\|\w+\|>", text))
    with pytest.raises(RowRejected, match=r"does not write <\|vision_start\|><\|video_pad\|><\|vision_end\|> for a"):
        encoder("qwen3_5", video=VIDEOS).renderer._around(Rendered(text, spans), "<|video_pad|>")


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One row as each layout and sampler."""
    folder = tmp_path_factory.mktemp("layouts")
    data = CLIPS[2].data
    assert isinstance(data, bytes)
    (folder / "a.mkv").write_bytes(data)
    turns = [{"role": "user", "content": "<video>What?"}, {"role": "assistant", "content": "It."}]
    rows = write_jsonl(folder / "rows.jsonl", [{"messages": turns, "videos": ["a.mkv"]}])
    kinds = {
        "plain": VideoConfig(max_pixels=100_000),
        "vllm": VideoConfig(max_pixels=100_000, layout=VideoLayout.VLLM),
        "utils": VideoConfig(sampler=VideoSampler.QWEN_VL_UTILS),
    }
    base = dataclasses.replace(encoder("qwen3_5").config, recipe="chat")
    for name, video in kinds.items():
        preprocess_dataset(open_source(str(rows)), folder / name, dataclasses.replace(base, video=video))
    return {name: folder / name for name in kinds}


def test_what_differs_between_servers_is_recorded_and_audited(datasets: dict[str, Path]) -> None:
    recorded = {name: open_dataset(at).manifest.config["options"]["video"] for name, at in datasets.items()}
    told = {name: (options.get("layout"), options.get("sampler")) for name, options in recorded.items()}
    assert told == {"plain": (None, None), "vllm": ("vllm", None), "utils": (None, "qwen-vl-utils")}
    assert [verify_dataset(at).faults for at in datasets.values()] == [[], [], []]
    plain, vllm, utils = (open_dataset(at)[0] for at in datasets.values())
    assert plain.length == vllm.length + 2
    # 23 frames at 4 per second: 11 at 2 per second, and 10 of even number. Each has at least 128 tokens.
    assert [each.video_grid_thw.tolist()[0][0] for each in (plain, utils) if each.video_grid_thw is not None] == [6, 5]
    assert utils.length > 5 * 128


def test_an_audit_by_the_other_layout_finds_faults(datasets: dict[str, Path]) -> None:
    for name in ("plain", "vllm"):
        dataset = open_dataset(datasets[name])
        rules = SampleRules.of(dataset.manifest)
        other = dataclasses.replace(rules, enclosed_videos=not rules.enclosed_videos)
        row = dataset.index.row(0)
        assert [check for check, _ in audit_sample(dataset[0], row, other)] == ["image_block"] * 2
        assert audit_sample(dataset[0], row, rules) == []


def test_datasets_of_two_layouts_are_not_joined(datasets: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigMismatchError, match=r"--video-layout: transformers in .*plain, vllm in .*vllm"):
        join_datasets([str(datasets["plain"]), str(datasets["vllm"])], tmp_path / "joined")


def test_options_without_effect_are_refused() -> None:
    for name, video, message in (
        ("qwen2_5_vl", VideoConfig(layout=VideoLayout.VLLM), "--video-layout vllm has no effect: .* tells no times"),
        ("internvl", VideoConfig(sampler=VideoSampler.QWEN_VL_UTILS), "no videos in the family internvl; drop it"),
        (
            "qwen3_5",
            VideoConfig(sampler=VideoSampler.QWEN_VL_UTILS, cap_pixels_per_frame=True),
            "--cap-pixels-per-frame has no effect with --video-sampler qwen-vl-utils",
        ),
    ):
        made = family(name)
        config = dataclasses.replace(encoder("qwen3_5").config, video=video)
        with pytest.raises(UsageError, match=message):
            video.to_json(made, config.codec)
