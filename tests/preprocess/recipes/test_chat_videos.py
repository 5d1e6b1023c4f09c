"""Videos of chat rows: at content items and marks, with the frames and sizes that the data requests."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from tests.preprocess.recipes.chat_recipe import check_rejected, convert, user
from vlmdata.preprocess.conversation import TextPart, VideoPart
from vlmdata.preprocess.recipes.chat.content import StrayMarks
from vlmdata.reasons import Reason

COUNT, FRAMES, CONTENT = Reason.VIDEO_COUNT_MISMATCH, Reason.VIDEO_FRAMES, Reason.UNSUPPORTED_CONTENT
ITEM = "messages[0].content[0]"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("a.mp4", "b.mp4", "f0.jpg", "f1.jpg"):
        (tmp_path / name).write_bytes(name.encode())
    return tmp_path


def videos(row: dict[str, Any], root: Path | None = None) -> list[VideoPart]:
    return [part for part in convert(row, root).media if isinstance(part, VideoPart)]


def video(item: dict[str, Any], root: Path | None = None, **columns: Any) -> VideoPart:
    (found,) = videos({"messages": user([item]), **columns}, root)
    return found


@pytest.mark.parametrize(
    "item",
    [
        {"type": "video", "video": "a.mp4"},
        {"video": "a.mp4"},
        {"type": "video", "path": "a.mp4"},
        {"type": "video", "url": "a.mp4"},
        {"type": "video_url", "video_url": {"url": "a.mp4"}},
        {"type": "video", "video": {"path": "a.mp4", "bytes": None}},
        {"type": "video", "video": "file://{root}/a.mp4"},
        {"type": "video", "video": b"a.mp4"},
        {"type": "video", "video": {"path": None, "bytes": b"a.mp4"}},
        {"type": "video", "video": f"data:video/mp4;base64,{base64.b64encode(b'a.mp4').decode()}"},
    ],
)
def test_items_name_a_video(item: dict[str, Any], root: Path) -> None:
    if isinstance(item.get("video"), str):
        item = {**item, "video": item["video"].format(root=root)}
    assert video(item, root).data == b"a.mp4"


def test_items_and_marks_take_the_videos_of_a_column_beside_the_images() -> None:
    row = {"messages": user("<video> and <image>, <video>"), "videos": [b"a", {"bytes": b"b", "fps": 1}], "image": b"i"}
    (asked, _) = convert(row).messages
    assert [part.text if isinstance(part, TextPart) else part.data for part in asked.parts] == [
        *(b"a", " and ", b"i", ", ", b"b"),
    ]
    assert [each.fps for each in videos(row)] == [None, 1.0]
    row = {"messages": user([{"type": "video", "fps": 4}, {"type": "image"}]), "video": b"a", "images": [b"i"]}
    assert videos(row)[0].fps == 4
    repeated = {"messages": user([{"type": "video", "video": b"a"}]), "videos": [b"a"]}
    assert len(videos(repeated)) == 1


def test_the_file_is_named_in_messages(root: Path) -> None:
    assert video({"video": "a.mp4"}, root).field == f"{ITEM} (a.mp4)"
    assert videos({"messages": user("<video>"), "videos": ["b.mp4"]}, root)[0].field == "videos[0] (b.mp4)"


def test_the_data_requests_frames_and_sizes() -> None:
    item = {"video": b"a", "fps": 2, "min_frames": 4, "max_frames": 8.0, "video_start": 0, "video_end": 2.5}
    part = video(item | {"min_pixels": 1024, "max_pixels": 4096, "total_pixels": 9999, "raw_fps": 30})
    assert (part.fps, part.min_frames, part.max_frames, part.start, part.end) == (2.0, 4, 8, 0.0, 2.5)
    assert (part.min_pixels, part.max_pixels, part.total_pixels) == (1024, 4096, 9999)
    assert video({"video": b"a", "nframes": 6, "fps": None}).num_frames == 6
    row = {"messages": user("<video>"), "videos": [{"path": None, "bytes": b"a", "nframes": 6}]}
    assert videos(row)[0].num_frames == 6
    unused = convert({"messages": user([{"video": b"a", "raw_fps": 30, "mood": "fine"}])})
    assert unused.unused == ("messages[].content[].raw_fps",)
    assert unused.unknown == ("messages[].content[].mood",)


def test_a_list_of_frames(root: Path) -> None:
    part = video({"type": "video", "video": ["f0.jpg", "f1.jpg"], "sample_fps": 2, "max_pixels": 4096}, root)
    assert (part.data, part.rate, part.max_pixels, part.field) == ((b"f0.jpg", b"f1.jpg"), 2.0, 4096, ITEM)
    assert video({"video": [b"f0"], "fps": 0.5}).rate == 0.5
    row = {"messages": user("<video>"), "videos": [{"video": [b"f0", b"f1"], "fps": 2, "sample_fps": 2}]}
    assert videos(row)[0].rate == 2.0


def test_numbers_may_be_text_as_in_the_example_of_qwen_vl_utils() -> None:
    assert video({"type": "video", "video": [b"f0", b"f1"], "sample_fps": "1"}).rate == 1.0
    row = {"messages": user("<video>"), "videos": [{"video": [b"f0", b"f1"], "fps": "0.5", "sample_fps": 0.5}]}
    assert videos(row)[0].rate == 0.5
    part = video({"video": b"a", "nframes": "8", "video_start": "1.5", "max_pixels": "4096"})
    assert (part.num_frames, part.start, part.max_pixels) == (8, 1.5, 4096)


def test_a_list_of_frames_with_their_times(root: Path) -> None:
    part = video({"type": "video", "video": ["f0.jpg", "f1.jpg"], "timestamps": [0, 2.5]}, root)
    assert (part.data, part.rate, part.timestamps, part.fps) == ((b"f0.jpg", b"f1.jpg"), None, (0.0, 2.5), None)
    row = {"messages": user("<video>"), "videos": [{"video": [b"f0", b"f1"], "timestamps": [3, 4], "fps": 1}]}
    assert (videos(row)[0].timestamps, videos(row)[0].fps) == ((3.0, 4.0), 1.0)
    part = video({"video": [b"f0", b"f1"], "timestamps": [3, 4], "nframes": 4, "video_start": 3.5, "sample_fps": None})
    assert (part.num_frames, part.start) == (4, 3.5)


@pytest.mark.parametrize(
    ("item", "reason", "message"),
    [
        ({"video": b"a", "fps": 0}, FRAMES, r"fps is 0; it must be a positive number of frames per second"),
        ({"video": b"a", "fps": "2 Hz"}, FRAMES, r"fps is '2 Hz'; it must be"),
        ({"video": b"a", "fps": "NaN"}, FRAMES, r"fps is nan; it must be"),
        ({"video": b"a", "fps": float("nan")}, FRAMES, r"fps is nan; it must be"),
        ({"video": b"a", "nframes": 2.5}, FRAMES, r"nframes is 2.5; it must be a positive whole number"),
        ({"video": b"a", "max_pixels": -1}, FRAMES, r"max_pixels is -1; it must be a positive whole number"),
        ({"video": b"a", "video_end": -1}, FRAMES, r"video_end is -1; it must be a number of seconds from 0"),
        ({"video": b"a", "fps": 1, "nframes": 4}, FRAMES, "nframes is 4; given with fps; keep one of them"),
        ({"video": b"a", "sample_fps": 1}, FRAMES, "sample_fps is 1; the rate of a list of frames"),
        ({"video": b"a", "resized_height": 64}, CONTENT, "resized_height is 64; a video is resized within min_pixels"),
        ({"video": [b"a"]}, FRAMES, "a list of frames without their rate, .*; write sample_fps or timestamps beside"),
        ({"video": [b"a"], "fps": 1, "sample_fps": 2}, FRAMES, "sample_fps is 2; not fps 1; keep one of them"),
        ({"video": [b"a"], "fps": 1, "nframes": 2}, FRAMES, "nframes is 2; for files and lists with timestamps; all f"),
        ({"video": [b"a", b"b"], "timestamps": [0]}, FRAMES, "timestamps has 1 time for 2 frames; write one per frame"),
        ({"video": [b"a", b"b"], "timestamps": [1, 1]}, FRAMES, r"timestamps\[1\] is 1, not after 1 before it; write"),
        (
            {"video": [b"a"], "timestamps": [-1]},
            FRAMES,
            r"timestamps\[0\] is -1; it must be a number of sec",
        ),
        ({"video": [b"a"], "timestamps": ["1"]}, FRAMES, r"timestamps\[0\] is '1'; it must be a number of seconds"),
        ({"video": [b"a"], "timestamps": 1}, FRAMES, "timestamps is 1; it must be a list of seconds, one per frame"),
        ({"video": b"a", "timestamps": [1]}, FRAMES, r"timestamps is \[1\]; for a list of frames; a file has its own"),
        ({"video": [b"a"], "timestamps": [1], "sample_fps": 1}, FRAMES, "sample_fps is 1; given with timestamps; keep"),
        ({"video": [b"a"], "timestamps": [1], "fps": 1, "nframes": 4}, FRAMES, "nframes is 4; given with fps"),
        ({"video": []}, Reason.EMPTY_VIDEO, "a list of frames without any"),
        ({"type": "video", "video": ""}, Reason.MISSING_VIDEO, "not a video: $"),
        ({"video": "a.mp4"}, Reason.VIDEO_PATH, "a.mp4 is a path; set --image-root to its base folder"),
        ({"video": "http://a.example/a.mp4"}, Reason.VIDEO_FETCH, "is a URL; --allow-urls fetches such videos"),
        ({"video": "data:video/mp4,a"}, Reason.NOT_A_VIDEO, "a data URI without ;base64"),
        ({"type": "video", "source": "a.mp4"}, CONTENT, "holds source: a.mp4; a video item names its file in one of"),
        ({"video": b"a", "path": "b"}, CONTENT, "names several videos: video, path"),
        ({"video": b"a", "text": "x"}, CONTENT, "is a text item, but holds video too"),
        ({"type": "video", "video": b"a", "image": b"b"}, CONTENT, "is a video item, but holds image too"),
        ({"type": "video"}, COUNT, "is placeholder 1, but the row has 0 videos"),
    ],
)
def test_what_is_rejected(item: dict[str, Any], reason: Reason, message: str) -> None:
    check_rejected({"messages": user([item])}, reason, rf"^messages\[0\]\.content\[0\].*{message}")


@pytest.mark.parametrize(
    ("row", "reason", "message"),
    [
        ({"messages": user("<video>?")}, COUNT, "<video> is placeholder 1, but the row has 0 videos. To keep the mark"),
        ({"messages": user("x"), "videos": [b"a"]}, COUNT, "0 video placeholders in the text for 1 video in videos"),
        ({"messages": user("<video>"), "videos": [b"a"], "video": b"b"}, COUNT, "videos and video have different vid"),
        ({"messages": user([{"video": b"a"}, "<video>"])}, COUNT, "content items of the row place its videos"),
        (
            {"messages": [*user("x"), {"role": "assistant", "content": [{"video": b"a"}]}]},
            CONTENT,
            r"messages\[2\]: a video in an assistant turn; only user and tool turns can hold videos",
        ),
        (
            {"messages": [{"role": "system", "content": "<video>"}, *user("x")], "videos": [b"a"]},
            COUNT,
            "holds the mark <video> in a system turn; only user and tool turns can hold videos",
        ),
        ({"messages": user("?", videos=["a.mp4"])}, CONTENT, "videos of a turn belong in its content"),
        (
            {"messages": user("<video>"), "videos": [b"a"], "max_pixels": 4096},
            CONTENT,
            r"max_pixels of the row is the size of its images, and videos\[0\] is a video",
        ),
        ({"messages": user("<video>"), "videos": [[b"a", b"b"]]}, FRAMES, r"videos\[0\]: a list of frames without"),
        ({"messages": user("<video>"), "videos": [{"video": [], "fps": 1}]}, Reason.EMPTY_VIDEO, "frames without any"),
    ],
)
def test_rows_that_are_rejected(row: dict[str, Any], reason: Reason, message: str) -> None:
    check_rejected(row, reason, message)


def test_stray_marks_are_kept_if_asked() -> None:
    row = {"messages": user("a <video> tag and <image>"), "images": [b"i"]}
    (asked, _) = convert(row, stray=StrayMarks.PLAIN).messages
    assert [part.text for part in asked.parts if isinstance(part, TextPart)] == ["a <video> tag and "]
