"""Pixels of videos beside those of qwen-vl-utils with its own decoder: what differs, and which is nearer to the source.

    pip install decord
    python benchmarks/video_readers.py

Draws clips and encodes them (H.264, 4:2:0, CRF 12), so the true colours are known. Without decord, PyAV's default
conversion takes its place; decord 0.6.0 and torchcodec 0.17.0 gave the same bytes. Behind docs/decisions/0132.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import av
import numpy as np
import numpy.typing as npt
import torch
from hardware import hardware
from PIL import Image, ImageDraw

from vlmdata.families import family
from vlmdata.media.video import sample_video
from vlmdata.preprocess.config import PreprocessConfig, VideoConfig, VideoSampler
from vlmdata.preprocess.conversation import VideoPart
from vlmdata.preprocess.encode.video import encode_video, plan_video

RATE = 30
Pixels = npt.NDArray[np.uint8]


def screen(number: int, size: tuple[int, int]) -> Pixels:
    """Text and coloured boxes that move."""
    width, height = size
    picture, random = Image.new("RGB", size, (250, 250, 245)), np.random.default_rng(3)
    draw = ImageDraw.Draw(picture)
    for line in range(60):
        x, y, wide, high = (int(random.integers(0, most)) for most in (width, height, 80, 40))
        draw.rectangle((x - number, y, x - number + wide, y + high), fill=tuple(random.integers(0, 256, 3).tolist()))
        draw.text((x + number, y), f"Total {line} 12.{line:02}", fill=(20, 20, 20))
    return np.asarray(picture)


def clouds(number: int, size: tuple[int, int]) -> Pixels:
    """Smooth colours that move, without edges."""
    width, height = size
    coarse = np.random.default_rng(5).normal(128, 40, (height // 40 + 2, width // 40 + 2, 3)).clip(0, 255)
    whole = Image.fromarray(coarse.astype(np.uint8)).resize((width + 128, height + 128), Image.Resampling.BICUBIC)
    return np.asarray(whole.crop((2 * number, number, 2 * number + width, number + height)))


CLIPS: dict[str, Callable[[int, tuple[int, int]], Pixels]] = {"screen": screen, "clouds": clouds}


def write(path: Path, frames: list[Pixels]) -> None:
    """Encodes a clip as phones and browsers do."""
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=RATE, options={"crf": "12"})
        assert isinstance(stream, av.VideoStream)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            out.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        out.mux(stream.encode())


class DefaultReader:
    """decord's reader with PyAV's default conversion."""

    def __init__(self, path: str) -> None:
        with av.open(path) as file:
            self._frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]

    def __len__(self) -> int:
        return len(self._frames)

    def get_avg_fps(self) -> float:
        """Frames per second."""
        return float(RATE)

    def get_batch(self, indices: list[int]) -> Any:
        """Frames by number."""
        return SimpleNamespace(asnumpy=lambda: np.stack([self._frames[index] for index in indices]))


def compared(name: str, frames: int, size: tuple[int, int]) -> dict[str, Any]:
    """Compares both on a clip."""
    from qwen_vl_utils import vision_process

    reader: Any = SimpleNamespace(VideoReader=DefaultReader, __version__="PyAV's default")
    with suppress(ImportError):
        reader = import_module("decord")
    rules, config = family("qwen3_5"), PreprocessConfig(video=VideoConfig(sampler=VideoSampler.QWEN_VL_UTILS))
    source = [CLIPS[name](number, size) for number in range(frames)]
    with (
        TemporaryDirectory() as folder,
        patch.dict(sys.modules, {"decord": reader}),
        patch.object(vision_process, "get_video_reader_backend", lambda: "decord"),
    ):
        path = Path(folder) / "clip.mp4"
        write(path, source)
        data = path.read_bytes()
        theirs, _ = vision_process.fetch_video({"video": str(path)}, rules.patch_size, return_video_metadata=True)
        plan = plan_video(VideoPart(data), config)
        decoded = reader.VideoReader(str(path)).get_batch(list(plan.numbers)).asnumpy()
    item, own = encode_video(plan, config), list[Pixels]()
    sample_video(data, lambda _: np.array(plan.indices), lambda *_: lambda _, pixels: own.append(pixels.copy()))
    t, h, w = item.grid
    stored = item.patches.reshape(t, h * w, item.copies, -1)
    ours = np.stack([rules.unpatchify(frame.copy(), h, w) for temporal in stored for frame in temporal.swapaxes(0, 1)])
    apart = np.abs(theirs.round().clamp(0, 255).to(torch.int16).numpy() - ours.astype(np.int16))
    true = np.stack([source[number] for number in plan.numbers]).astype(np.int16)
    return {
        "reader": reader.__version__,
        "values that differ": float((apart > 0).mean()),
        "by more than 1": float((apart > 1).mean()),
        "most": int(apart.max()),
        "mean": float(apart.mean()),
        "mean error to the source, vlmdata": float(np.abs(np.stack(own) - true).mean()),
        "mean error to the source, qwen-vl-utils": float(np.abs(decoded - true).mean()),
    }


if __name__ == "__main__":
    print(json.dumps(hardware("av", "qwen-vl-utils", "torch")))
    for clip in CLIPS:
        print(clip, json.dumps(compared(clip, 60, (640, 360))))
