"""What is wrong with videos in rows, as the command writes it to the ledger. Good rows beside them are kept."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.chat_rows import write_jsonl
from tests.conftest import encoded_image
from tests.media.video.clips import clip, without_frames
from tests.media.video.test_frames import cut
from tests.preprocess.command_line import SMALL_IMAGES, Ended
from vlmdata import StreamingLoader, open_dataset
from vlmdata.format.schema import LEDGER_NAME
from vlmdata.inspect.sample import describe_sample
from vlmdata.verify.dataset import verify_dataset

ITEM = "messages[0].content[0]"
#: Files that are used, and what their metadata has of them.
KEPT: dict[str, dict[str, Any]] = {
    "one.mp4": {"file_frames": 1, "frames": [0, 0]},
    "short.webm": {"file_frames": 7, "codec": "vp9", "rate": 30.0},
    "uneven.mkv": {"file_frames": 5, "frames": [0, 1, 1, 1, 1], "seconds": [0.0, 0.5, 0.5, 0.5, 0.5]},
    "turned.mp4": {"width": 128, "height": 32},
    "interlaced.mp4": {"interlaced": True},
    "hdr.mp4": {"pixels": "yuv420p10le", "hdr": "pq"},
    "odd.mkv": {"width": 65, "height": 49},
    "sound.mkv": {"file_frames": 10},
    "overstated.avi": {"file_frames": 40, "declared_frames": 400},
    "cut.ts": {"file_frames": 48, "leading_frames": 7},
    "animated.gif": {"codec": "gif", "file_frames": 8},
}
#: Row, its reason, and the start of its message. None for a row that is kept.
ROWS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"type": "video", "video": "good.mp4"}, None, ""),
    ({"type": "video"}, "video_count_mismatch", f"{ITEM} is placeholder 1, but the row has 0 videos"),
    ({"video": "gone.mp4"}, "missing_video", f"{ITEM}: no file gone.mp4 in the image root: FileNotFoundError. Correct"),
    ({"video": "../outside.mp4"}, "video_path", f"{ITEM}: ../outside.mp4 is outside the image root"),
    ({"video": "https://a.example/a.mp4"}, "video_fetch", f"{ITEM}: https://a.example/a.mp4 is a URL; --allow-urls"),
    ({"video": "page.mp4"}, "not_a_video", f"{ITEM} (page.mp4): a web page (HTML)"),
    ({"video": "empty.mp4"}, "empty_video", f"{ITEM} (empty.mp4): the file has 0 bytes. Get it again"),
    ({"video": "large.mp4"}, "video_too_large", f"{ITEM} (large.mp4): frames of 640x480 = 307200 pixels, over the"),
    ({"video": "cut.mkv"}, "damaged_video", f"{ITEM} (cut.mkv): "),
    ({"video": ["a.png", "b.png"], "sample_fps": 1}, "unsupported_video", f"{ITEM}[1]: 64x32 pixels, but the first"),
    ({"video": "good.mp4", "video_start": 9}, "video_frames", f"{ITEM} (good.mp4): no frame from video_start 9 s"),
    ({"video": "good.mp4", "fps": -1}, "video_frames", f"{ITEM}.fps is -1; it must be a positive number"),
    ({"video": "good.mp4", "resized_width": 64}, "unsupported_content", f"{ITEM}.resized_width is 64"),
    ({"video": ["gone.png"], "fps": 1}, "missing_image", f"{ITEM}[0]: no file gone.png in the image root"),
    ({"video": ["a.png", "a.png", "a.png"], "fps": 2}, None, ""),
    (
        {"video": "wide.mp4"},
        "aspect_ratio",
        f"{ITEM} (wide.mp4): frames of 1024x2 pixels, enlarged to 16384x32 pixels: aspect ratio 512.0, over 200",
    ),
    ({"video": "long.mp4", "fps": 30}, "overlong", ""),
    ({"video": ["a.png", "a.png"], "timestamps": [1, 1]}, "video_frames", f"{ITEM}.timestamps[1] is 1, not after 1"),
    ({"video": "none.avi"}, "empty_video", f"{ITEM} (none.avi): avi with mjpeg has no frames"),
    ({"video": "zeros.mp4"}, "damaged_video", f"{ITEM} (zeros.mp4): "),
    ({"video": "bent.mp4"}, "unsupported_video", f"{ITEM} (bent.mp4): the file asks to turn its frames by "),
    ({"video": "huge.mp4"}, "video_too_large", f"{ITEM}: huge.mp4 has 2147483649 bytes, over 2147483648; cut it into"),
    *(({"video": name}, None, "") for name in KEPT),
    ({"video": "data:video/mp4;base64,{good}"}, None, ""),
    ({"video": ["a.png", "a.png", "a.png"], "timestamps": [10, 10.5, 17.25]}, None, ""),
]


def unusual(noise: list[np.ndarray]) -> dict[str, bytes]:
    """The files of ``KEPT``, and damaged ones."""
    zeros = bytearray(clip("libx264", 60, 10, frames=noise, options={"g": "10"}, muxer={"movflags": "faststart"}))
    zeros[-len(zeros) // 8 :] = bytes(len(zeros) // 8)
    overstated = clip("mjpeg", 40).replace(struct.pack("<I", 40), struct.pack("<I", 400))
    stripes = np.zeros((48, 64, 3), np.uint8)
    stripes[::2] = 255
    return {
        "zeros.mp4": bytes(zeros),
        "none.avi": without_frames(),
        "bent.mp4": clip("libx264", 2, rotation=30),
        "one.mp4": clip("libx264", 1),
        "short.webm": clip("libvpx-vp9", 7),
        "uneven.mkv": clip("ffv1", 5, 10, times=[0, 5, 35, 36, 37], time_base=Fraction(1, 10), container="matroska"),
        "turned.mp4": clip("libx264", 12, 6, (32, 128), rotation=90),
        "interlaced.mp4": clip("libx264", 4, frames=[stripes] * 4, options={"x264-params": "interlaced=1"}),
        "hdr.mp4": clip("libx265", 6, 6, pixels="yuv420p10le", context={"color_trc": 16}),
        "odd.mkv": clip("ffv1", 8, 4, size=(49, 65), pixels="yuv420p", container="matroska"),
        "sound.mkv": clip("libx264", 10, container="matroska", sound=True),
        "overstated.avi": overstated,
        "cut.ts": cut(clip("mpeg2video", 60, options={"g": "12"}), 5, "mpegts"),
        "animated.gif": clip("gif", 8, 4),
    }


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows") / "root"
    folder.mkdir()
    (folder.parent / "outside.mp4").write_bytes(b"secret")
    random = np.random.default_rng(0)
    noise = [random.integers(0, 256, (48, 64, 3), np.uint8) for _ in range(60)]
    whole = clip("libx264", 60, 10, frames=noise, container="matroska", options={"g": "10"})
    files = {
        "good.mp4": clip("libx264", 30, 10),
        "page.mp4": b"<html><body>404</body></html>",
        "empty.mp4": b"",
        "large.mp4": clip("libx264", 2, size=(480, 640)),
        "cut.mkv": whole[: len(whole) // 2],
        "wide.mp4": clip("libx264", 2, size=(2, 1024)),
        "long.mp4": clip("libx264", 120, 30, size=(480, 480)),
        "a.png": encoded_image(64, 48),
        "b.png": encoded_image(64, 32),
    }
    files |= unusual(noise)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    with (folder / "huge.mp4").open("wb") as huge:
        huge.truncate((2 << 30) + 1)  # takes no space
    answer = {"role": "assistant", "content": "Yes."}
    good = base64.b64encode(files["good.mp4"]).decode()
    items = [item for item, _, _ in ROWS]
    items = [{"video": each["video"].format(good=good)} if "{good}" in str(each) else each for each in items]
    chats = [{"messages": [{"role": "user", "content": [item, {"text": "So?"}]}, answer]} for item in items]
    return write_jsonl(folder / "rows.jsonl", chats)


def run(vlmdata: Callable[..., Ended], rows: Path, out: Path, *more: str) -> dict[int, dict[str, Any]]:
    """Runs the command in this process. Returns its ledger by row."""
    limits = ("--max-source-pixels", "240000", "--max-reject-rate", "1", "--workers", "1", "--max-length", "6000")
    assert not vlmdata("preprocess", rows, "--out", out, *SMALL_IMAGES, *limits, *more).code
    entries = [json.loads(line) for line in (out / LEDGER_NAME).read_text().splitlines()]
    return {entry["row"]: entry for entry in entries}


def test_each_reason_is_in_the_ledger(rows: Path, tmp_path: Path, vlmdata: Callable[..., Ended]) -> None:
    found = run(vlmdata, rows, tmp_path / "out")
    expected = {row: reason for row, (_, reason, _) in enumerate(ROWS) if reason is not None}
    assert {row: entry["reason"] for row, entry in found.items()} == expected
    for row, (_, _, message) in enumerate(ROWS):
        assert row not in found or found[row]["message"].startswith(message), found[row]["message"]
    assert "--damaged-videos keep" in found[8]["message"]
    dataset = open_dataset(tmp_path / "out")
    kept = [row for row, (_, reason, _) in enumerate(ROWS) if reason is None]
    assert dataset.index.source_row.tolist() == kept
    origins = {row: dataset.metadata(number)["images"][0] for number, row in enumerate(kept)}
    for row, told in zip(kept[2:], KEPT.values(), strict=False):
        assert {name: origins[row][name] for name in told} == told, ROWS[row][0]
    turned = dataset[kept.index(ROWS.index(({"video": "turned.mp4"}, None, "")))]
    _, height, width = turned.items[0].grid
    assert height > width
    same, timed = (origins[row] for row in kept[-2:])
    assert same == origins[0]
    assert timed["seconds"] == [10, 10.5, 17.25]
    assert timed["patch_seconds"] == [10.25, 17.25]
    with StreamingLoader([tmp_path / "out"], capacity=1 << 13, global_batch=1, num_workers=0) as loader:
        assert sum(int(batch.num_samples) for batch in loader) == len(kept)
    for number in range(len(kept)):
        (video,) = describe_sample(dataset, number).images
        assert video.frames
    assert dataset.manifest.source["image_files"]["missing"] == 2
    assert verify_dataset(tmp_path / "out").faults == []


def test_damaged_videos_are_kept_up_to_the_damage_if_asked(
    rows: Path, tmp_path: Path, vlmdata: Callable[..., Ended]
) -> None:
    found = run(vlmdata, rows, tmp_path / "out", "--damaged-videos", "keep", "--video-max-frames", "4")
    assert 8 not in found
    dataset = open_dataset(tmp_path / "out")
    (origin,) = dataset.metadata(dataset.index.source_row.tolist().index(8))["images"]
    assert "bytes are missing" in origin["damage"]
    assert len(origin["frames"]) == 4
    assert dataset.manifest.config["options"]["video"]["damaged"] == "keep"
    assert verify_dataset(tmp_path / "out").faults == []


def test_a_trace_shows_the_frames(rows: Path, vlmdata: Callable[..., Ended]) -> None:
    code, shown, _ = vlmdata("preprocess", rows, *SMALL_IMAGES, "--trace", 0, columns=200)
    assert not code
    assert f"video {ITEM} (good.mp4)" in shown
    assert "of 64 × 48, 30 frames, stored as 6 frames from 0.00 to 2.90 s of 64 × 64" in " ".join(shown.split())
    assert "<1.4 seconds><|vision_start|><|video_pad|> × 4<|vision_end|>" in shown
