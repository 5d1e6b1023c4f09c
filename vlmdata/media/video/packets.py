"""Lists the packets of a video file: what tells its frames without decoding."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from vlmdata.media.video.complete import incomplete, unread
from vlmdata.media.video.container import VideoLimits, VideoSource, file_of, opened, reason_of

if TYPE_CHECKING:
    from av.container.input import InputContainer
    from av.packet import Packet

#: Containers without a presentation time for each packet, and codecs of which some packets show nothing.
_UNTIMED_FORMATS = frozenset({"avi", "mpeg", "mpegvideo", "h264", "hevc", "vvc", "m4v", "obu", "mjpeg", "dv", "rm"})
_UNTIMED_CODECS = frozenset({"vp8"})
#: Codecs that show the frame of each packet at once, so that its decoding time is its presentation time.
_IN_ORDER_CODECS = frozenset(
    {
        *("cinepak", "dvvideo", "ffv1", "ffvhuff", "flv1", "h261", "h263", "h263p", "huffyuv", "indeo3", "magicyuv"),
        *("mjpeg", "msmpeg4v1", "msmpeg4v2", "msmpeg4v3", "msvideo1", "png", "rawvideo", "utvideo", "wmv1", "wmv2"),
    }
)
#: Headers declare the length of these files. A file that ends this much earlier is incomplete.
_DECLARING_FORMATS = ("mov", "matroska", "flv", "asf")
_SLACK_SECONDS = 0.5


@dataclass(eq=False)
class Packets:
    """What the packets of a video stream tell, in the order of the file.

    Attributes:
        container: FFmpeg's name of the container.
        codec: FFmpeg's name of the codec.
        time_base: Seconds per unit of time.
        declared_frames: Number of frames in the header; 0 if it has none.
        declared_rates: Frames per second that the file declares, best first.
        reorders: Whether the codec shows frames in another order than that of the packets.
        times: Presentation times; None where a packet has none.
        decoding: Times at which they are decoded; None likewise.
        durations: In the same unit; 0 if unknown.
        keys: Whether decoding can begin there.
        shown: Whether the frame is to be shown.
        damage: Where and how the file is damaged; "" if it is not, or that is not seen without decoding.
        ends: When the last packet of any stream ends, in seconds.
    """

    container: str
    codec: str
    time_base: Fraction
    declared_frames: int
    declared_rates: tuple[Fraction, ...]
    reorders: bool
    times: list[int | None] = field(default_factory=list)
    decoding: list[int | None] = field(default_factory=list)
    durations: list[int] = field(default_factory=list)
    keys: list[bool] = field(default_factory=list)
    shown: list[bool] = field(default_factory=list)
    damage: str = ""
    ends: float = 0.0

    @property
    def in_order(self) -> bool:
        """Whether each packet is a frame that is shown when it is decoded."""
        return self.codec in _IN_ORDER_CODECS

    @property
    def timed(self) -> bool:
        """Whether there is one packet for each frame, with the time at which it is shown."""
        shown = [time for time, shown in zip(self.times, self.shown, strict=True) if shown]
        known = self.container not in _UNTIMED_FORMATS and self.codec not in _UNTIMED_CODECS
        # A writer that does not know of B frames gives the times of decoding as those of presentation.
        known = known and not (self.reorders and len(shown) > 2 and self.times == self.decoding)
        known = known or self.in_order
        return known and None not in self.times and len(set(shown)) == len(shown) and any(self.keys)

    @property
    def seen(self) -> int | None:
        """If the file is damaged, the time up to which no packet is missing; None if that is not known.

        Packets are in the order of decoding, and no picture is shown before it is decoded.
        """
        return next((time for time in reversed(self.decoding) if time is not None), None) if self.damage else None

    @property
    def leading(self) -> frozenset[int]:
        """Numbers of the packets that need a key frame before the first one of the file.

        A file that was cut from another begins with them. They are before the first key frame in the file, or after it
        and shown before it. Decoders leave them out, or invent what they refer to.
        """
        first = self.keys.index(True) if any(self.keys) else 0
        begin = self.times[first] if self.timed else None
        if begin is None:
            return frozenset(range(first))
        after = range(first + 1, len(self.times))
        return frozenset([*range(first), *(number for number in after if (self.times[number] or 0) < begin)])

    def add(self, packet: Packet[Any]) -> None:
        """Notes a packet."""
        self.times.append(time_of(packet, self.in_order))
        self.decoding.append(packet.dts)
        self.durations.append(packet.duration or 0)
        self.keys.append(packet.is_keyframe)
        self.shown.append(not packet.is_discard)

    def drop_last(self) -> None:
        """Forgets the last packet."""
        for column in (self.times, self.decoding, self.durations, self.keys, self.shown):
            del column[-1:]


def time_of(packet: Packet[Any], in_order: bool) -> int | None:
    """Returns when the frame of a packet is shown, if the packet tells it.

    Args:
        packet: The packet.
        in_order: Whether its codec shows frames in the order of packets.
    """
    return packet.dts if packet.pts is None and in_order else packet.pts


def read_packets(source: VideoSource, limits: VideoLimits, what: str) -> Packets:
    """Reads all packets of a file.

    Raises:
        MediaError: If the file does not open, as for :func:`~vlmdata.media.video.container.opened`.
    """
    import av

    with opened(source, limits, what) as (container, stream):
        found = Packets(
            container=container.format.name,
            codec=str(stream.codec_context.codec.canonical_name),
            time_base=_fraction(stream.time_base),
            declared_frames=stream.frames,
            declared_rates=tuple(_fraction(rate) for rate in (stream.base_rate, stream.average_rate) if rate),
            reorders=stream.codec_context.has_b_frames,
        )
        with file_of(source) as file:
            passed_over = unread(file, found.container)
        try:
            for packet in container.demux():
                if (at := packet.dts if packet.pts is None else packet.pts) is not None:
                    found.ends = max(found.ends, float((at + (packet.duration or 0)) * packet.time_base))
                if packet.stream is not stream or not packet.size:
                    continue
                if passed_over and (packet.pos or 0) >= passed_over.at:
                    break
                if packet.is_corrupt:
                    found.damage = f"its packet {len(found.times)} is cut off or damaged"
                    break
                found.add(packet)
        except (av.FFmpegError, UnicodeDecodeError) as error:
            found.damage = f"its packet {len(found.times)} cannot be read: {reason_of(error)}"
        if passed_over:
            found.damage = found.damage or passed_over.damage
        elif not found.damage:
            found.damage = _cut_off(source, container, found.ends)
            if found.damage:  # the last packet may be a part of one
                found.drop_last()
        return found


def _cut_off(source: VideoSource, container: InputContainer, ends: float) -> str:
    """Describes what a file lacks at its end; "" if it is complete or does not tell."""
    with file_of(source) as file:
        if missing := incomplete(file, container.format.name):
            return missing
    declared = _declared_end(container)
    return f"it ends after {ends:.2f} s, and its header declares {declared:.2f} s" if declared > ends else ""


def _declared_end(container: InputContainer) -> float:
    """Returns when the header says that the file ends, less some slack, in seconds; 0 if it does not say so."""
    if container.duration is None or not container.format.name.startswith(_DECLARING_FORMATS):
        return 0.0
    # MP4 declares the length from the first packet on. Matroska's writers declare the end.
    begin = max(container.start_time or 0, 0) if container.format.name.startswith("mov") else 0
    return (container.duration + begin) / 1e6 - _SLACK_SECONDS


def _fraction(value: Any) -> Fraction:
    return Fraction(value.numerator, value.denominator)
