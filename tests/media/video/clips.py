"""Small video files whose frames tell their number: eight black or white bars, the bits of the number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import av
import numpy as np

#: Codec -> container, pixel format and options that encode without a word.
KINDS: Mapping[str, tuple[str, str, Mapping[str, str]]] = {
    "libx264": ("mp4", "yuv420p", {}),
    "libx265": ("mp4", "yuv420p", {"x265-params": "log-level=none"}),
    "libvpx-vp9": ("webm", "yuv420p", {}),
    "libvpx": ("webm", "yuv420p", {"auto-alt-ref": "1", "lag-in-frames": "16"}),
    "libsvtav1": ("mp4", "yuv420p", {"svtav1-params": "lp=1"}),
    "gif": ("gif", "rgb8", {}),
    "mjpeg": ("avi", "yuvj420p", {}),
    "mpeg4": ("avi", "yuv420p", {"bf": "2"}),
    "mpeg2video": ("mpegts", "yuv420p", {"bf": "2"}),
    "ffv1": ("matroska", "yuv420p10le", {}),
}


def picture(number: int, width: int = 64, height: int = 48) -> np.ndarray:
    """A frame: uint8 (H, W, 3)."""
    bits = np.array([number >> bit & 1 for bit in range(8)])
    bars = bits[np.arange(width) * 8 // width]
    return np.ascontiguousarray(np.broadcast_to(np.uint8(bars * 255)[None, :, None], (height, width, 3)))


def number_of(pixels: np.ndarray) -> int:
    """Reads the number of a frame."""
    width = pixels.shape[1]
    middles = pixels.mean(axis=(0, 2))[(2 * np.arange(8) + 1) * width // 16]
    return int(sum(1 << bit for bit, value in enumerate(middles) if value > 127))


def clip(
    codec: str = "libx264",
    count: int = 40,
    rate: Fraction | int = 30,
    size: tuple[int, int] = (48, 64),
    *,
    container: str | None = None,
    pixels: str | None = None,
    options: Mapping[str, str] = {},
    times: Sequence[int] | None = None,
    time_base: Fraction | None = None,
    rotation: int | None = None,
    mirrored: tuple[bool, bool] = (False, False),
    context: Mapping[str, Any] = {},
    frames: Sequence[np.ndarray] | None = None,
    sound: bool = False,
    muxer: Mapping[str, str] = {},
) -> bytes:
    """Encodes a file.

    Args:
        codec: FFmpeg's encoder.
        count: Number of frames.
        rate: Frames per second.
        size: (height, width).
        container: FFmpeg's container; None is that of ``KINDS``.
        pixels: Pixel format; None is that of ``KINDS``.
        options: Of the encoder, besides those of ``KINDS``.
        times: When each frame is shown, in units of ``time_base``; None is an even rate.
        time_base: Unit of time; None is one frame.
        rotation: Degrees in the display matrix.
        mirrored: Whether that mirrors columns and rows; needs ``rotation``.
        context: Attributes of the encoder.
        frames: Pictures, uint8 (H, W, 3); None are those of the numbers.
        sound: Whether there is a sound track, longer than the video.
        muxer: Options of the container.
    """
    kind = KINDS[codec]
    unit = time_base or 1 / Fraction(rate)
    file = NamedTemporaryFile()  # noqa: SIM115 - some containers are read again while they are written
    with file, av.open(file.name, "w", format=container or kind[0], options=dict(muxer)) as out:
        stream = out.add_stream(codec, rate=Fraction(rate), options={**kind[2], **options})
        stream.height, stream.width = size
        stream.pix_fmt = pixels or kind[1]
        stream.codec_context.thread_count = 1
        stream.codec_context.time_base = unit
        if codec in ("libx264", "libx265") and count < 4:
            stream.codec_context.max_b_frames = 0  # with fewer frames than they delay, times are what memory held
        for name, value in context.items():
            setattr(stream.codec_context, name, value)
        if rotation is not None:
            stream.set_display_rotation(rotation, *mirrored)
        track = out.add_stream("pcm_s16le", rate=8000) if sound else None
        for number in range(count):
            drawn = picture(number, size[1], size[0]) if frames is None else frames[number]
            frame = av.VideoFrame.from_ndarray(drawn, format="rgb24")
            frame.pts, frame.time_base = number if times is None else times[number], unit
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
        if track is not None:
            silence = av.AudioFrame.from_ndarray(np.zeros((1, 8 * 2000), np.int16), format="s16", layout="mono")
            silence.sample_rate, silence.pts = 8000, 0
            out.mux(track.encode(silence))
            out.mux(track.encode())
        out.close()
        return Path(file.name).read_bytes()


def without_frames() -> bytes:
    """A file with a header alone."""
    file = BytesIO()
    with av.open(file, "w", format="avi") as out:
        stream = out.add_stream("mjpeg", rate=30)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuvj420p"
        out.start_encoding()
    return file.getvalue()
