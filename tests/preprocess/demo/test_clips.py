"""The drawn clips: a folder as users have it, from which the command makes a dataset."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from vlmdata.media.video import read_contents, sample_video
from vlmdata.preprocess.demo import clips
from vlmdata.preprocess.demo.chat import demo_conversation
from vlmdata.preprocess.demo.clips import write_demo_clips
from vlmdata.preprocess.recipes.chat import Chat
from vlmdata.preprocess.recipes.media import MediaLoader
from vlmdata.preprocess.row import Row


def _collecting(frames: list[np.ndarray], *_: object) -> Callable[[int, np.ndarray], None]:
    return lambda _, pixels: frames.append(pixels.copy())


def _frames_of(path: Path) -> np.ndarray:
    """All frames, uint8 (n, height, width, 3)."""
    frames: list[np.ndarray] = []
    sample_video(path.read_bytes(), lambda each: np.arange(len(each)), partial(_collecting, frames))
    return np.stack(frames)


def test_clips_and_chats_are_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clips, "SECONDS", 1)
    chats = write_demo_clips(tmp_path / "one", 3)
    files = sorted((tmp_path / "one" / "clips").iterdir())
    assert sorted(each.suffix for each in files) == [".mkv", ".mp4", ".webm"]
    rows = [json.loads(line) for line in chats.read_text().splitlines()]
    shown = []
    for number, row in enumerate(rows):
        conversation = Chat(Chat.Options(), MediaLoader(str(tmp_path / "one"), False))(Row(number, row))
        (video,) = conversation.media
        assert isinstance(video.data, bytes)
        contents, frames = read_contents(video.data), list[np.ndarray]()
        assert (len(contents), contents.rate) == (clips.RATE, clips.RATE)
        sample_video(video.data, lambda each: np.arange(len(each)), partial(_collecting, frames))
        # A camera that moves over a drawn receipt: neither empty nor still.
        assert min(float(each.std()) for each in frames) > 10
        assert float(np.abs(frames[0].astype(int) - frames[-1]).mean()) > 2
        part = next(p for message in row["messages"] for p in message["content"] if p["type"] == "video")
        shown.append(int(Path(part["video"]).stem.removeprefix("receipt-")))
    # Each conversation is the one about the receipt that its clip shows.
    for row, receipt in zip(rows, shown, strict=True):
        number = next(n for n in range(20) if demo_conversation(n)[1] == (receipt,))
        told = [part["text"] for each in row["messages"] for part in each["content"] if part["type"] == "text"]
        parts = [part for each in demo_conversation(number)[0] for part in each["content"]]
        assert told == [part["text"] for part in parts if part["type"] == "text"]
    write_demo_clips(tmp_path / "two", 2)
    # On a busy machine x264 once wrote a byte of another value, so frames are compared and not files.
    for again in (tmp_path / "two" / "clips").iterdir():
        first, second = (_frames_of(folder / again.name) for folder in (tmp_path / "one" / "clips", again.parent))
        assert np.abs(first.astype(int) - second).mean() < 0.5
    assert len(list((tmp_path / "two" / "clips").iterdir())) == 2
