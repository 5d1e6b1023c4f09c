"""Lists the frames of a video file: which there are, when each is shown, and where decoding for it begins.

Headers are not trusted: some overstate the number of frames. The packets tell it without decoding, so a long file costs
one pass over its bytes. Where packets do not tell the presentation times (AVI, MPEG program streams, raw streams, VP8
with its invisible frames), all frames are decoded once to count them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vlmdata.media.error import MediaError
from vlmdata.media.video.container import VideoLimits, VideoSource, decoded, opened, reason_of
from vlmdata.media.video.packets import Packets, read_packets
from vlmdata.media.video.picture import Pictures, colour_of
from vlmdata.reasons import Reason
from vlmdata.wording import counted

if TYPE_CHECKING:
    from av.video.frame import VideoFrame

#: The frame rate that transformers assumes if there is none.
UNKNOWN_RATE = Fraction(24)


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
        leading: Numbers of the packets at the begin of a cut file that need a key frame before it. Their frames are
            left out: they are not among ``times``.
        size: (height, width) of the upright frames in pixels.
        file_size: (height, width) as stored.
        container: FFmpeg's name of the container.
        codec: FFmpeg's name of the codec.
        in_order: Whether each packet is a frame that is shown when it is decoded.
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
    leading: frozenset[int]
    size: tuple[int, int]
    file_size: tuple[int, int]
    container: str
    codec: str
    in_order: bool
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
        """Returns the frames that are shown at the times ``index / rate``, int64 (n,); see :func:`on_display`."""
        return on_display(self.times, self.rate * self.time_base, indices)

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


def on_display(times: npt.NDArray[np.int64], rate: Fraction, indices: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """Returns the frames on display at the times ``index / rate`` that sampling rules choose.

    Rules know an even rate only. Where frames come evenly, but for rounded times, index i is frame i: a frame counts
    from half an interval before its time on. Elsewhere, it is the last frame at or before the time.

    Args:
        times: (N,), when each frame is shown, in any unit; ascending.
        rate: Frames per unit: the declared rate, or the mean.
        indices: (n,), indices as of frames at this rate, at least 0.

    Returns:
        int64 (n,).
    """
    since, numbers = times - times[0], np.arange(len(times))
    even = any(
        np.abs(since - numbers * interval).max() <= 1
        for interval in (float(1 / rate), since[-1] / max(len(times) - 1, 1))
    )
    # Of the time index / rate, the last whole unit; twice of all, because half an interval may be half a unit.
    span, early = 2 * rate, 1 if even else 0
    latest = [(2 * index + early) * span.denominator // span.numerator for index in np.asarray(indices).tolist()]
    return np.searchsorted(since, latest, side="right").astype(np.int64) - 1


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
    packets = read_packets(source, limits, what)
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


def _decoded(source: VideoSource, limits: VideoLimits, what: str, packets: Packets, all: bool) -> _Decoded:
    """Decodes the first frame, or all of them.

    Raises:
        MediaError: EMPTY_VIDEO if there is none, DAMAGED_VIDEO if it does not decode.
    """
    import av

    first: VideoFrame | None = None
    times, damage = list[int | None](), ""
    with opened(source, limits, what) as (container, stream):
        try:
            for frame in decoded(container, stream, packets.leading):
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


def _by_packets(packets: Packets, first: _Decoded, what: str) -> VideoContents:
    """Makes the contents of a file whose packets tell the times.

    Raises:
        MediaError: DAMAGED_VIDEO if no frame is certain.
    """
    all_times = np.array(packets.times, dtype=np.int64)
    left_out = np.array(sorted(packets.leading), dtype=np.int64)
    shown = np.setdiff1d(np.flatnonzero(packets.shown), left_out)
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


def _by_decoding(packets: Packets, frames: _Decoded) -> VideoContents:
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
    packets: Packets,
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
        leading=packets.leading,
        size=first.size,
        file_size=first.file_size,
        container=packets.container,
        codec=packets.codec,
        in_order=packets.in_order,
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
