"""Lists the frames of a video file: which there are, when each is shown, and where decoding for it begins.

Headers are not trusted: some overstate the number of frames. The packets tell it without decoding, so a long file costs
one pass over its bytes. Where packets do not tell the presentation times (AVI, MPEG program streams, raw streams, VP8
with its invisible frames), all frames are decoded once to count them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vlmdata.media.error import MediaError
from vlmdata.media.video.complete import incomplete
from vlmdata.media.video.container import VideoLimits, VideoSource, file_of, opened, reason_of
from vlmdata.media.video.picture import Pictures, colour_of
from vlmdata.reasons import Reason
from vlmdata.wording import counted

if TYPE_CHECKING:
    from av.container.input import InputContainer
    from av.video.frame import VideoFrame

#: The frame rate that transformers assumes if there is none.
UNKNOWN_RATE = Fraction(24)
#: Containers without a presentation time for each packet, and codecs of which some packets show nothing.
_UNTIMED_FORMATS = frozenset({"avi", "mpeg", "mpegvideo", "h264", "hevc", "vvc", "m4v", "obu", "mjpeg", "dv", "rm"})
_UNTIMED_CODECS = frozenset({"vp8"})
#: Headers declare the length of these files. A file that ends this much earlier is incomplete.
_DECLARING_FORMATS = ("mov", "matroska", "flv", "asf")
_SLACK_SECONDS = 0.5


@dataclass(frozen=True, eq=False)
class VideoContents:
    """What a video file holds.

    Attributes:
        times: int64 (N,), when each frame is shown, in units of ``time_base``; ascending.
        end: When the last frame ends, in the same unit.
        time_base: Seconds per unit.
        rate: Frames per second: the declared rate if the frames keep it, else the mean.
        packets: int64 (N,), number of each frame's packet in the file; None if the frames were counted by decoding.
        starts: int64 (N,), number of the packet at which decoding for a frame begins; None as above.
        size: (height, width) of the upright frames in pixels.
        file_size: (height, width) as stored.
        container: FFmpeg's name of the container.
        codec: FFmpeg's name of the codec.
        declared_frames: Number of frames in the header; 0 if it has none.
        colour: Pixel format, and if so HDR and interlacing, of the first frame.
        damage: Where and how the file is damaged; "" if it is not, or no frame was found to be.
    """

    times: npt.NDArray[np.int64]
    end: int
    time_base: Fraction
    rate: Fraction
    packets: npt.NDArray[np.int64] | None
    starts: npt.NDArray[np.int64] | None
    size: tuple[int, int]
    file_size: tuple[int, int]
    container: str
    codec: str
    declared_frames: int
    colour: Mapping[str, str | bool]
    damage: str = ""

    def __len__(self) -> int:
        return len(self.times)

    def seconds(self, numbers: npt.NDArray[np.integer] | list[int]) -> npt.NDArray[np.float64]:
        """Returns when frames are shown, in seconds after the first: float64 (n,)."""
        ticks = self.times[np.asarray(numbers, np.int64)] - self.times[0]
        seconds: npt.NDArray[np.float64] = ticks * float(self.time_base)
        return seconds

    def shown_at(self, indices: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Returns the frames that are shown at the times ``index / rate``, int64 (n,).

        Sampling rules know an even rate only. In a file with such a rate, index i is frame i. Otherwise, it is the
        frame on display at that time, up to half a mean frame early, so that rounded times do not matter.

        Args:
            indices: (n,) indices as of a file with an even rate, at least 0.
        """
        span = 2 * self.rate * self.time_base  # twice the frames per unit of time
        latest = [(2 * index + 1) * span.denominator // span.numerator for index in np.asarray(indices).tolist()]
        return np.searchsorted(self.times - self.times[0], latest, side="right").astype(np.int64) - 1

    def up_to(self, number: int, damage: str) -> VideoContents:
        """Returns the contents without the frames from a damaged one on.

        Args:
            number: The first frame to leave out, at least 1.
            damage: What is wrong with it.
        """
        times, end = self.times[:number], int(self.times[number])
        packets, starts = (None if each is None else each[:number] for each in (self.packets, self.starts))
        rate = _rate(times, end, (self.rate,), self.time_base)
        return replace(self, times=times, end=end, rate=rate, packets=packets, starts=starts, damage=damage)


def read_contents(source: VideoSource, limits: VideoLimits = VideoLimits(), what: str = "video") -> VideoContents:
    """Lists the frames of a file.

    Args:
        source: The file.
        limits: What is accepted.
        what: Name of the field for messages, such as ``videos[2]``.

    Raises:
        MediaError: NOT_A_VIDEO, UNSUPPORTED_VIDEO, VIDEO_TOO_LARGE; EMPTY_VIDEO without frames; DAMAGED_VIDEO for
            incomplete files, unless ``keep_damaged`` and a frame before the damage is left.
    """
    packets = _read_packets(source, limits, what)
    frames = _decoded(source, limits, what, packets, all=not packets.timed)
    contents = _by_packets(packets, frames, what) if packets.timed else _by_decoding(packets, frames)
    if contents.damage and not limits.keep_damaged:
        raise damaged(contents, len(contents), contents.damage, what)
    return contents


def damaged(contents: VideoContents, left: int, damage: str, what: str) -> MediaError:
    """Returns the error of a damaged file.

    Args:
        contents: Its frames.
        left: Number of frames before the damage.
        damage: What is wrong with it.
        what: Name of the field for messages.
    """
    if not left:
        return MediaError(Reason.DAMAGED_VIDEO, f"{what}: {damage}. Get the file again.")
    seconds = contents.seconds([left - 1])[0]
    return MediaError(
        Reason.DAMAGED_VIDEO,
        f"{what}: {damage}. Get the file again, or use what is before the damage, {counted(left, 'frame')} up to "
        f"{seconds:.2f} s, with --damaged-videos keep.",
    )


@dataclass(frozen=True, eq=False)
class _Packets:
    """What the packets of a video stream tell, in the order of the file.

    Attributes:
        times: Presentation times; None where a packet has none.
        durations: In the same unit; 0 if unknown.
        keys: Whether decoding can begin there.
        shown: Whether the frame is to be shown.
        damage: As in :class:`VideoContents`.
        seen: If the file is damaged, the time up to which no packet is missing; None if that is not known.
        timed: Whether there is one packet for each frame, with the time at which it is shown.
    """

    container: str
    codec: str
    time_base: Fraction
    declared_frames: int
    declared_rates: tuple[Fraction, ...]
    times: list[int | None]
    durations: list[int]
    keys: list[bool]
    shown: list[bool]
    damage: str
    seen: int | None

    @property
    def timed(self) -> bool:
        shown = [time for time, shown in zip(self.times, self.shown, strict=True) if shown]
        known = self.container not in _UNTIMED_FORMATS and self.codec not in _UNTIMED_CODECS
        return known and None not in self.times and len(set(shown)) == len(shown) and any(self.keys)


def _read_packets(source: VideoSource, limits: VideoLimits, what: str) -> _Packets:
    import av

    times, durations, keys, shown = list[int | None](), list[int](), list[bool](), list[bool]()
    decoding, ends, damage = list[int | None](), 0.0, ""
    with opened(source, limits, what) as (container, stream):
        try:
            for packet in container.demux():
                if (at := packet.dts if packet.pts is None else packet.pts) is not None:
                    ends = max(ends, float((at + (packet.duration or 0)) * packet.time_base))
                if packet.stream is not stream or not packet.size:
                    continue
                if packet.is_corrupt:
                    damage = f"its packet {len(times)} is cut off or damaged"
                    break
                times.append(packet.pts)
                durations.append(packet.duration or 0)
                keys.append(packet.is_keyframe)
                shown.append(not packet.is_discard)
                # Packets are in the order of decoding, and no picture is shown before it is decoded.
                decoding.append(packet.dts)
        except (av.FFmpegError, UnicodeDecodeError) as error:
            damage = f"its packet {len(times)} cannot be read: {reason_of(error)}"
        declared = _declared_end(container)
        if not damage:
            with file_of(source) as file:
                damage = incomplete(file, container.format.name)
            if not damage and declared > ends + _SLACK_SECONDS:
                damage = f"it ends after {ends:.2f} s, and its header declares {declared:.2f} s"
            if damage:  # the last packet may be a part of one
                for column in (times, decoding, durations, keys, shown):
                    del column[-1:]
        return _Packets(
            container=container.format.name,
            codec=str(stream.codec_context.codec.canonical_name),
            time_base=_fraction(stream.time_base),
            declared_frames=stream.frames,
            declared_rates=tuple(_fraction(rate) for rate in (stream.base_rate, stream.average_rate) if rate),
            times=times,
            durations=durations,
            keys=keys,
            shown=shown,
            damage=damage,
            seen=next((time for time in reversed(decoding) if time is not None), None) if damage else None,
        )


def _declared_end(container: InputContainer) -> float:
    """Returns when the header says that the file ends, in seconds; 0 if it does not say so."""
    if container.duration is None or not container.format.name.startswith(_DECLARING_FORMATS):
        return 0.0
    return (container.duration + max(container.start_time or 0, 0)) / 1e6


@dataclass(frozen=True, eq=False)
class _Decoded:
    """The first frame of a file, or what all tell.

    Attributes:
        size: As in :class:`VideoContents`; so are ``file_size`` and ``colour``.
        times: Presentation times of the decoded frames.
        damage: Why decoding stopped; "" if it did not.
    """

    size: tuple[int, int]
    file_size: tuple[int, int]
    colour: Mapping[str, str | bool]
    times: list[int | None]
    damage: str


def _decoded(source: VideoSource, limits: VideoLimits, what: str, packets: _Packets, all: bool) -> _Decoded:
    """Decodes the first frame, or all of them.

    Raises:
        MediaError: EMPTY_VIDEO if there is none, DAMAGED_VIDEO if it does not decode.
    """
    import av

    first: VideoFrame | None = None
    times, damage = list[int | None](), ""
    with opened(source, limits, what) as (container, stream):
        try:
            for frame in container.decode(stream):
                if frame.is_corrupt:
                    damage = f"frame {len(times)} does not decode without errors"
                    break
                first = first or frame
                times.append(frame.pts)
                if not all:
                    break
        except (av.FFmpegError, UnicodeDecodeError) as error:
            damage = f"frame {len(times)} does not decode: {reason_of(error)}"
    if first is not None:
        return _Decoded(Pictures(what).size(first), (first.height, first.width), colour_of(first), times, damage)
    if damage := damage or packets.damage:
        raise _damaged_at_once(damage, what)
    declared = f", although its header declares {packets.declared_frames}" if packets.declared_frames else ""
    raise MediaError(Reason.EMPTY_VIDEO, f"{what}: {packets.container} with {packets.codec} has no frames{declared}")


def _damaged_at_once(damage: str, what: str) -> MediaError:
    return MediaError(Reason.DAMAGED_VIDEO, f"{what}: {damage}, and no frame before that. Get the file again.")


def _by_packets(packets: _Packets, first: _Decoded, what: str) -> VideoContents:
    """Makes the contents of a file whose packets tell the times.

    Raises:
        MediaError: DAMAGED_VIDEO if no frame is certain.
    """
    all_times = np.array(packets.times, dtype=np.int64)
    shown = np.flatnonzero(packets.shown)
    if packets.seen is not None:
        shown = shown[all_times[shown] <= packets.seen]
    if not len(shown):
        raise _damaged_at_once(packets.damage, what)
    order = shown[np.argsort(all_times[shown])]
    # A frame is decoded from the last key frame before it in the file that is not shown after it: pictures that
    # follow a key frame but are shown before it need the key frame before.
    keys = np.flatnonzero(packets.keys)
    key_times = all_times[keys]
    starts = np.empty(len(order), np.int64)
    for number, packet in enumerate(order.tolist()):
        at = int(np.searchsorted(keys, packet, side="right")) - 1
        while at > 0 and key_times[at] > all_times[packet]:
            at -= 1
        starts[number] = keys[max(at, 0)]
    last_duration = packets.durations[order[-1]]
    return _contents(packets, first, all_times[order], last_duration, packets.damage, order, starts)


def _by_decoding(packets: _Packets, frames: _Decoded) -> VideoContents:
    """Makes the contents of a file of which all frames were decoded.

    Their times are those of the decoder if they ascend; else the frames come at the declared rate.
    """
    times = np.array([-1 if time is None else time for time in frames.times], dtype=np.int64)
    damage = frames.damage or packets.damage
    if None in frames.times or (np.diff(times) <= 0).any():
        rate = next(iter(packets.declared_rates), UNKNOWN_RATE)
        ticks = [round(number / (rate * packets.time_base)) for number in range(len(times) + 1)]
        times = np.array(ticks[:-1], dtype=np.int64)
    return _contents(packets, frames, times, 0, damage, None, None)


def _contents(
    packets: _Packets,
    first: _Decoded,
    times: npt.NDArray[np.int64],
    last_duration: int,
    damage: str,
    order: npt.NDArray[np.int64] | None,
    starts: npt.NDArray[np.int64] | None,
) -> VideoContents:
    declared, unit = packets.declared_rates, packets.time_base
    interval = last_duration
    if interval <= 0 and len(times) > 1:
        interval = max(int(np.median(np.diff(times))), 1)
    elif interval <= 0:
        interval = max(round(1 / (next(iter(declared), UNKNOWN_RATE) * unit)), 1)
    end = int(times[-1]) + interval
    return VideoContents(
        times=times,
        end=end,
        time_base=unit,
        rate=_rate(times, end, declared, unit),
        packets=order,
        starts=starts,
        size=first.size,
        file_size=first.file_size,
        container=packets.container,
        codec=packets.codec,
        declared_frames=packets.declared_frames,
        colour=first.colour,
        damage=damage,
    )


def _rate(times: npt.NDArray[np.int64], end: int, declared: Sequence[Fraction], unit: Fraction) -> Fraction:
    """Returns a declared rate if each frame comes when it says, but for rounded times; else the mean rate."""
    count, begin = len(times), int(times[0])
    for rate in declared:
        step = 1 / (rate * unit)
        even = begin + np.arange(count) * float(step)
        if step >= 1 and np.abs(even - times).max() <= 1 and abs(begin + count * float(step) - end) <= 2:
            return rate
    return count / ((end - begin) * unit)


def _fraction(value: Any) -> Fraction:
    return Fraction(value.numerator, value.denominator)
