"""Decodes some frames of a video file, one at a time, and begins at key frames to skip what is not needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vlmdata.media.error import MediaError
from vlmdata.media.video.container import VideoLimits, VideoSource, decoded, opened, reason_of
from vlmdata.media.video.contents import VideoContents
from vlmdata.media.video.packets import time_of
from vlmdata.media.video.picture import Pictures
from vlmdata.reasons import Reason

if TYPE_CHECKING:
    from av.container.input import InputContainer
    from av.packet import Packet
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

#: Packets to skip from which on it is worth to seek, instead of reading them.
_SEEK_PACKETS = 300


class DamagedFrameError(Exception):
    """A frame of a video does not decode.

    Attributes:
        number: The frame.
        message: What is wrong with it.
    """

    def __init__(self, number: int, message: str):
        super().__init__(message)
        self.number = number
        self.message = message


def decode_frames(
    source: VideoSource, contents: VideoContents, numbers: Sequence[int], limits: VideoLimits, what: str
) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    """Yields frames as upright RGB.

    Args:
        source: The file.
        contents: Its frames.
        numbers: Frames to decode; ascending, each once.
        limits: As for :func:`~vlmdata.media.video.contents.read_contents`.
        what: Name of the field for messages.

    Yields:
        The number of a frame, and its pixels: uint8 (H, W, 3), C-contiguous. One frame is held at a time.

    Raises:
        DamagedFrameError: If a frame does not decode.
        MediaError: UNSUPPORTED_VIDEO if the size changes within the file.
    """
    pictures, left = Pictures(what), list(numbers)
    # Some files seek to a wrong place, and some key frames depend on frames before them in spite of their mark. Such
    # frames are tried again with less skipped.
    ways = [_from_the_start] if contents.starts is None else [_by_seeking, _by_skipping, _from_the_start]
    for way in ways:
        try:
            for number, frame in way(source, contents, left.copy(), limits, what):
                yield number, _pixels(frame, pictures, contents, what)
                left.pop(0)
            return
        except DamagedFrameError:
            if way is ways[-1]:
                raise


def _pixels(frame: VideoFrame, pictures: Pictures, contents: VideoContents, what: str) -> npt.NDArray[np.uint8]:
    if (frame.height, frame.width) != contents.file_size:
        height, width = contents.file_size
        raise MediaError(
            Reason.UNSUPPORTED_VIDEO,
            f"{what}: its frames change from {width}x{height} to {frame.width}x{frame.height} pixels; split the file",
        )
    return pictures.rgb(frame)


def _from_the_start(
    source: VideoSource, contents: VideoContents, wanted: list[int], limits: VideoLimits, what: str
) -> Iterator[tuple[int, VideoFrame]]:
    """Yields frames, decoding all before them."""
    with opened(source, limits, what) as (container, stream):
        frames = decoded(container, stream, contents.leading)
        if contents.starts is not None:
            yield from _matched(frames, contents, wanted)
        else:  # counted by decoding, so their order is what is known
            yield from _counted(frames, wanted)


def _by_skipping(
    source: VideoSource, contents: VideoContents, wanted: list[int], limits: VideoLimits, what: str
) -> Iterator[tuple[int, VideoFrame]]:
    """Yields frames, decoding each from the last key frame before it. Packets in between are read, and dropped."""
    with opened(source, limits, what) as (container, stream):
        yield from _matched(_Skipping(container, stream, contents, wanted, seeks=False), contents, wanted)


def _by_seeking(
    source: VideoSource, contents: VideoContents, wanted: list[int], limits: VideoLimits, what: str
) -> Iterator[tuple[int, VideoFrame]]:
    """Yields frames, decoding each from the last key frame before it, and seeking over long stretches."""
    with opened(source, limits, what) as (container, stream):
        yield from _matched(_Skipping(container, stream, contents, wanted, seeks=True), contents, wanted)


def _matched(
    frames: Iterable[VideoFrame], contents: VideoContents, wanted: list[int]
) -> Iterator[tuple[int, VideoFrame]]:
    """Yields the wanted ones of decoded frames, and removes them from ``wanted``.

    Raises:
        DamagedFrameError: If one of them is damaged or left out.
    """
    with _as_damage(wanted):
        for frame in frames:
            while wanted and frame.pts is not None and frame.pts >= (time := int(contents.times[wanted[0]])):
                if frame.pts > time:
                    raise DamagedFrameError(wanted[0], f"frame {wanted[0]} does not decode: the decoder left it out")
                _require_whole(frame, wanted[0])
                yield wanted.pop(0), frame
            if not wanted:
                return
    raise DamagedFrameError(wanted[0], f"frame {wanted[0]} does not decode: the data end before it")


def _counted(frames: Iterable[VideoFrame], wanted: list[int]) -> Iterator[tuple[int, VideoFrame]]:
    """Yields the wanted ones of all frames by their order; else as :func:`_matched`."""
    with _as_damage(wanted):
        for number, frame in enumerate(frames):
            if number == wanted[0]:
                _require_whole(frame, number)
                yield wanted.pop(0), frame
            if not wanted:
                return
    raise DamagedFrameError(wanted[0], f"frame {wanted[0]} does not decode: the data end before it")


def _require_whole(frame: VideoFrame, number: int) -> None:
    if frame.is_corrupt:
        raise DamagedFrameError(number, f"frame {number} does not decode without errors")


@contextmanager
def _as_damage(wanted: list[int]) -> Iterator[None]:
    """Turns errors of FFmpeg into the damage of the first wanted frame."""
    import av

    try:
        yield
    except (av.FFmpegError, UnicodeDecodeError) as error:
        raise DamagedFrameError(wanted[0], f"frame {wanted[0]} does not decode: {reason_of(error)}") from error


class _Skipping:
    """Decoded frames, without those that no wanted frame needs. ``wanted`` shrinks while it runs.

    Frames to which no other refers are decoded only if they are wanted, unless their packets may hold half a frame.

    Args:
        container: The file.
        stream: Its video stream.
        contents: Its frames.
        wanted: The frames that are still needed.
        seeks: Whether long stretches are skipped by seeking; else their packets are read.
    """

    def __init__(
        self, container: InputContainer, stream: VideoStream, contents: VideoContents, wanted: list[int], seeks: bool
    ) -> None:
        self._container, self._stream, self._wanted, self._seeks = container, stream, wanted, seeks
        self._contents = contents
        self._packets = self._read()
        self._position = 0  # number of the next packet
        assert contents.packets is not None
        self._needed = None if contents.colour.get("interlaced") else {*contents.packets[wanted].tolist()}

    def __iter__(self) -> Iterator[VideoFrame]:
        assert self._contents.starts is not None
        codec, earliest = self._stream.codec_context, None
        while self._wanted:
            start = int(self._contents.starts[self._wanted[0]])
            if start > self._position:
                codec.flush_buffers()
                packet = self._skip_to(start)
                earliest = self._time(packet)
            else:
                following = next(self._packets, None)
                if following is None:
                    break
                packet = following
                self._position += 1
            number = self._position - 1
            # Pictures after a key frame in the file but shown before it need the key frame before, which was skipped.
            time = self._time(packet)
            if number in self._contents.leading or (earliest is not None and time is not None and time < earliest):
                continue
            if self._needed is not None:
                codec.skip_frame = "DEFAULT" if number in self._needed else "NONREF"
            yield from codec.decode(packet)
        yield from codec.decode(None)

    def _time(self, packet: Packet[VideoStream]) -> int | None:
        return time_of(packet, self._contents.in_order)

    def _read(self) -> Iterator[Packet[VideoStream]]:
        return (packet for packet in self._container.demux(self._stream) if packet.size)

    def _skip_to(self, number: int) -> Packet[VideoStream]:
        """Returns the packet of a number."""
        if self._seeks and number - self._position >= _SEEK_PACKETS:
            packet = self._seek(number)
        else:
            packet = self._next(number)
            self._position += 1
        while self._position <= number:
            packet = self._next(number)
            self._position += 1
        return packet

    def _seek(self, number: int) -> Packet[VideoStream]:
        """Seeks to the packet of a number or one before it, and returns that."""
        contents = self._contents
        assert contents.packets is not None
        wanted = int(contents.times[np.flatnonzero(contents.packets == number)[0]])
        self._container.seek(wanted, stream=self._stream, backward=True)
        self._packets = self._read()
        packet = self._next(number)
        found = np.flatnonzero(contents.times == self._time(packet))
        if len(found) == 0 or contents.packets[found[0]] > number:
            raise self._lost(f"a seek to packet {number} leads elsewhere")
        self._position = int(contents.packets[found[0]]) + 1
        return packet

    def _next(self, number: int) -> Packet[VideoStream]:
        packet = next(self._packets, None)
        if packet is None:
            raise self._lost(f"the data end before packet {number}")
        return packet

    def _lost(self, why: str) -> DamagedFrameError:
        return DamagedFrameError(self._wanted[0], f"frame {self._wanted[0]} does not decode: {why}")
