"""Opens video files for reading, with limits on what FFmpeg may do with them."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from vlmdata.media.error import MediaError
from vlmdata.media.signatures import VIDEO, recognise
from vlmdata.media.video.claims import excess
from vlmdata.reasons import Reason
from vlmdata.wording import counted

if TYPE_CHECKING:
    from av.container.input import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

#: A video: its bytes, or the path of its file, which is then read in parts.
type VideoSource = bytes | Path

#: FFmpeg's readers of single files. Its readers of playlists open other files and URLs, which data must not name.
_FORMATS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,gif,mpegts,mpeg,mpegvideo,flv,asf,ogg,mxf,nut,ivf,obu,h264,hevc,vvc,"
    "m4v,mjpeg,dv,rm,apng,webp_anim"
)
_HEAD_BYTES = 1024
#: First bytes of images. Pillow opens them, so :func:`~vlmdata.media.signatures.recognise` does not know them.
_IMAGES = {b"\xff\xd8\xff": "JPEG", b"\x89PNG\r\n": "PNG", b"BM": "BMP"}


@dataclass(frozen=True)
class VideoLimits:
    """What is accepted of a video file.

    Attributes:
        max_source_pixels: Files with larger frames are rejected before decoding.
        keep_damaged: Whether the frames before the first damage are used; else the file is rejected.
    """

    max_source_pixels: int = 2**28
    keep_damaged: bool = False


def file_of(source: VideoSource) -> IO[bytes]:
    """Opens the bytes of a video. FFmpeg gets no path: it gives names with a colon a meaning of their own."""
    return io.BytesIO(source) if isinstance(source, bytes) else source.open("rb")


@contextmanager
def opened(source: VideoSource, limits: VideoLimits, what: str) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Opens a file, and yields it with its video stream, ready to decode in one thread.

    Args:
        source: The file.
        limits: Tells the largest frame.
        what: Name of the field for messages, such as ``videos[2]``.

    Raises:
        MediaError: EMPTY_VIDEO, NOT_A_VIDEO, UNSUPPORTED_VIDEO, DAMAGED_VIDEO if it does not open, or VIDEO_TOO_LARGE.
    """
    import av

    with ExitStack() as stack:
        file = stack.enter_context(file_of(source))
        head = file.read(_HEAD_BYTES)
        size = file.seek(0, io.SEEK_END)
        if size == 0:
            raise MediaError(Reason.EMPTY_VIDEO, f"{what}: the file has 0 bytes. Get it again")
        if problem := excess(file):
            raise MediaError(Reason.DAMAGED_VIDEO, f"{what}: {problem}. Get the file again")
        file.seek(0)
        try:
            container = stack.enter_context(av.open(file, "r", options={"format_whitelist": _FORMATS}))
        except (av.FFmpegError, UnicodeDecodeError) as error:
            raise _not_opened(head, size, error, what) from error
        yield container, _video_stream(container, limits, what)


def decoded(container: InputContainer, stream: VideoStream, left_out: Collection[int] = ()) -> Iterator[VideoFrame]:
    """Yields the frames of a video stream, in the order in which they are shown.

    Args:
        container: The file, at its begin.
        stream: The stream.
        left_out: Numbers of packets with data that are not decoded.
    """
    packets = (packet for packet in container.demux(stream) if packet.size)
    for number, packet in enumerate(packets):
        if number not in left_out:
            yield from stream.codec_context.decode(packet)
    yield from stream.codec_context.decode(None)


def _video_stream(container: InputContainer, limits: VideoLimits, what: str) -> VideoStream:
    import av
    from av.stream import Disposition

    streams = [each for each in container.streams.video if not each.disposition & Disposition.attached_pic]
    if not streams:
        others = ", ".join(sorted({each.type for each in container.streams if each.type != "video"}))
        found = f"{container.format.name} with {others} only" if others else f"{container.format.name} without streams"
        raise MediaError(Reason.NOT_A_VIDEO, f"{what}: {found}, no video. Remove it from the data, or name its video")
    best = container.streams.best("video")
    stream = best if isinstance(best, av.VideoStream) and best in streams else streams[0]
    codec = stream.codec_context
    if codec is None:
        raise MediaError(
            Reason.UNSUPPORTED_VIDEO,
            f"{what}: {container.format.name} with a codec that FFmpeg {av.ffmpeg_version_info} cannot decode; convert "
            "it: ffmpeg -i a.xyz a.mp4",
        )
    if codec.width * codec.height > limits.max_source_pixels:
        raise MediaError(
            Reason.VIDEO_TOO_LARGE,
            f"{what}: frames of {codec.width}x{codec.height} = {codec.width * codec.height} pixels, over the limit of "
            f"{limits.max_source_pixels} (--max-source-pixels)",
        )
    # One thread: workers decode one video each, and the same errors show every time. Without "explode", decoders invent
    # pictures for damaged data; an HEVC decoder leaves them out. That of H.264 flags such frames, so what it overlooks
    # without a trace, such as units of other encoders that are no pictures, is no damage.
    # FFmpeg pads rows to a multiple of 64 pixels before it compares them with its own limit.
    padded = limits.max_source_pixels + 64 * codec.height
    errors = {} if codec.codec.canonical_name == "h264" else {"err_detect": "explode"}
    codec.options = {**errors, "max_pixels": str(padded)}
    codec.thread_count = 1
    return stream


def _not_opened(head: bytes, size: int, error: Exception, what: str) -> MediaError:
    found, bytes_ = recognise(head), counted(size, "byte")
    if found is VIDEO or head.startswith((b"GIF8", b"OggS")):
        return MediaError(
            Reason.DAMAGED_VIDEO,
            f"{what}: a video of {bytes_} that does not open: {reason_of(error)}. It is probably incomplete; get the "
            "file again.",
        )
    if found is None:
        image = next((name for start, name in _IMAGES.items() if head.startswith(start)), "")
        message = (
            f"a {image} image ({bytes_}), not a video. Name it as an image, or as frames of a video in a list with fps."
            if image
            else f"{bytes_}, not a video that can be opened; they begin with {head[:8].hex(' ')}. If another program "
            "plays it, convert it: ffmpeg -i a.xyz a.mp4. Else get the file again."
        )
        return MediaError(Reason.NOT_A_VIDEO, f"{what}: {message}")
    return MediaError(Reason.NOT_A_VIDEO, f"{what}: {found.name} ({bytes_}), not a video. {found.remedy}.")


def reason_of(error: Exception) -> str:
    """Returns what an error of FFmpeg says, in one line without the name of a file."""
    text = getattr(error, "strerror", None) or str(error)
    return (str(text).strip() or type(error).__name__).splitlines()[0]
