"""Draws short clips, in which a camera moves over a receipt, and conversations about them.

    python -m vlmdata.preprocess.demo.clips build/clips

writes video files and ``chats.jsonl`` beside them: a folder as users have it.
"""

import json
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from vlmdata.media.decode import decode_image
from vlmdata.preprocess.demo.chat import demo_conversation
from vlmdata.preprocess.demo.row import demo_receipt

CLIPS = 4
RATE, SECONDS = 10, 4
#: Sides of an upright frame in pixels.
_SIDES = (480, 640)
_MOST_PIXELS = 10**8
#: Kinds of files; each is one of those that cameras, browsers and servers make.
_FILES = (("mp4", "libx264"), ("webm", "libvpx-vp9"), ("mkv", "libx264"))


def write_demo_clips(folder: Path, clips: int = CLIPS) -> Path:
    """Writes clips, and ``chats.jsonl`` with a conversation about each. Returns that file.

    Args:
        folder: Where to; made if it is missing.
        clips: Number of clips.
    """
    (folder / "clips").mkdir(parents=True, exist_ok=True)
    rows, row = list[dict[str, Any]](), 0
    while len(rows) < clips:
        messages, shown = demo_conversation(row)
        row += 1
        parts = [part for message in messages for part in message["content"] if part["type"] == "image"]
        if len(shown) != 1 or len(parts) != 1:
            continue
        ending, codec = _FILES[len(rows) % len(_FILES)]
        name = f"clips/receipt-{shown[0]:03}.{ending}"
        pixels = decode_image(demo_receipt(shown[0]).file.data, _MOST_PIXELS).pixels
        receipt = Image.fromarray(np.ascontiguousarray(pixels))
        _encode(folder / name, codec, receipt)
        parts[0].clear()
        parts[0].update(type="video", video=name)
        for message in messages:
            message["content"] = [{k: v for k, v in part.items() if v is not None} for part in message["content"]]
        rows.append({"messages": [{k: v for k, v in each.items() if v is not None} for each in messages]})
    chats = folder / "chats.jsonl"
    chats.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in rows))
    return chats


def _encode(path: Path, codec: str, receipt: Image.Image) -> None:
    import av

    # Without "bitexact", WebM and Matroska have random numbers.
    with av.open(str(path), "w", options={"fflags": "bitexact"}) as out:
        stream = out.add_stream(codec, rate=Fraction(RATE))
        assert isinstance(stream, av.VideoStream)
        (stream.width, stream.height), stream.pix_fmt = _size(receipt), "yuv420p"
        stream.codec_context.thread_count = 1
        stream.options = {"preset": "veryfast", "crf": "23"} if codec == "libx264" else {"cpu-used": "8", "crf": "30"}
        for number in range(RATE * SECONDS):
            view = _view(receipt, number / (RATE * SECONDS - 1))
            frame = av.VideoFrame.from_ndarray(view, format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, RATE)
            out.mux(stream.encode(frame))
        out.mux(stream.encode())


def _view(receipt: Image.Image, share: float) -> npt.NDArray[np.uint8]:
    """What the camera sees: first all of the receipt, then closer, from its head to its foot, or from left to right."""
    size = _size(receipt)
    closer = min(1.0, share / 0.25)
    closer = closer * closer * (3 - 2 * closer)  # no jerk at either end
    along = max(0.0, (share - 0.25) / 0.75)
    fits = [have / shown for have, shown in zip(receipt.size, size, strict=True)]
    scale = max(fits) + (min(fits) - max(fits)) * closer
    box = []
    for have, shown in zip(receipt.size, size, strict=True):
        spare = have - scale * shown
        box.append(spare * (0.5 * (1 - closer) + along * closer))
    corners = [round(each) for each in (*box, *(at + scale * n for at, n in zip(box, size, strict=True)))]
    # Around the receipt is what it lies on.
    table = Image.new("RGB", (corners[2] - corners[0], corners[3] - corners[1]), receipt.getpixel((2, 2)))
    table.paste(receipt, (-corners[0], -corners[1]))
    return np.asarray(table.resize(size, Image.Resampling.BILINEAR))


def _size(receipt: Image.Image) -> tuple[int, int]:
    """Width and height of the frames in pixels: upright for long receipts."""
    return (_SIDES[1], _SIDES[0]) if receipt.width > receipt.height else _SIDES


if __name__ == "__main__":
    print(write_demo_clips(Path(sys.argv[1])))
