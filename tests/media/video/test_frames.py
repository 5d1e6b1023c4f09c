"""Which frames a file has, and that a sampled frame is the one that is shown at its time."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from io import BytesIO
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.media.video.clips import KINDS, clip, number_of, picture
from vlmdata.media.versions import video_versions
from vlmdata.media.video import SampledVideo, read_contents, sample_video
from vlmdata.media.video import decode as decoding
from vlmdata.media.video.container import VideoLimits, VideoSource
from vlmdata.media.video.contents import on_display
from vlmdata.media.video.picture import Pictures


def sampled(source: VideoSource, indices: list[int], **limits: int) -> tuple[SampledVideo, list[np.ndarray]]:
    """The frames of a file at some indices."""
    frames: list[np.ndarray] = []

    def put(place: int, pixels: np.ndarray) -> None:
        assert place == len(frames)
        frames.append(pixels)

    made = sample_video(source, lambda _: np.array(indices), lambda *_: put, VideoLimits(**limits))
    return made, frames


@cache
def file_of(codec: str) -> bytes:
    return clip(codec, 40, options={"g": "12"})


@cache
def all_of(codec: str) -> list[np.ndarray]:
    return sampled(file_of(codec), list(range(40)))[1]


@pytest.mark.parametrize("codec", KINDS)
def test_every_kind_of_file_gives_each_of_its_frames(codec: str) -> None:
    contents = read_contents(file_of(codec))
    assert len(contents) == 40
    assert contents.rate == pytest.approx(30, rel=0.01)
    assert contents.size == contents.file_size == (48, 64)
    assert [number_of(pixels) for pixels in all_of(codec)] == list(range(40))
    assert all(np.abs(pixels - picture(n).astype(int)).mean() < 12 for n, pixels in enumerate(all_of(codec)))


@settings(max_examples=40)
@given(st.sampled_from(sorted(KINDS)), st.lists(st.integers(0, 39), min_size=1, max_size=6).map(sorted))
def test_a_frame_is_the_same_whichever_others_are_decoded(codec: str, indices: list[int]) -> None:
    made, frames = sampled(file_of(codec), indices)
    assert made.numbers.tolist() == indices
    assert [number_of(pixels) for pixels in frames] == indices
    assert all(np.array_equal(pixels, all_of(codec)[n]) for n, pixels in zip(indices, frames, strict=True))


def test_bytes_and_the_path_of_a_file_give_the_same(tmp_path: Path) -> None:
    path = tmp_path / "http:a.mp4"  # no protocol for FFmpeg
    path.write_bytes(file_of("libx264"))
    assert np.array_equal(sampled(path, [5, 39])[1], sampled(file_of("libx264"), [5, 39])[1])


@pytest.mark.parametrize("rate", [Fraction(24000, 1001), 24, 25, Fraction(30000, 1001), 30, Fraction(60000, 1001), 12])
@pytest.mark.parametrize("container", ["matroska", "mp4", "mpegts"])
def test_an_even_rate_is_found_whatever_the_unit_of_time(container: str, rate: Fraction) -> None:
    contents = read_contents(clip("libx264", 50, rate, container=container))
    assert float(contents.rate) == pytest.approx(float(rate), rel=1e-6)
    assert contents.shown_at(np.arange(50)).tolist() == list(range(50))
    assert np.allclose(contents.seconds(list(range(50))), np.arange(50) / float(rate), atol=1e-3)


@settings(max_examples=25)
@given(st.lists(st.integers(1, 30), min_size=2, max_size=30))
@example([10] * 9 + [910] + [1000] * 9)  # a burst, then a picture every ten seconds
def test_with_a_variable_rate_the_last_frame_at_or_before_the_time_is_chosen(steps: list[int]) -> None:
    """Compared with PyAV's own times of frames."""
    times = [sum(steps[:number]) for number in range(len(steps))]
    data = clip("ffv1", len(times), 30, times=times, time_base=Fraction(1, 100), container="matroska")
    with av.open(BytesIO(data)) as file:
        shown = [Fraction(frame.pts) * frame.time_base for frame in file.decode(video=0)]
    assert [round(100 * (time - shown[0])) for time in shown] == times
    contents = read_contents(data)
    chosen = contents.shown_at(np.arange(len(times))).tolist()
    even = np.abs(np.array(times) - np.linspace(0, times[-1], len(times))).max() <= 0.1  # milliseconds in the file
    for index, number in enumerate(chosen):
        at = shown[0] + index / contents.rate
        if even:
            at += 1 / (2 * contents.rate)
        assert number == max(n for n, time in enumerate(shown) if time <= at)


@pytest.mark.parametrize("last", [1, 33])
def test_frames_at_even_intervals_are_those_of_their_indices(last: int) -> None:
    """29.97 frames per second in whole milliseconds, also if the file says of the last frame that it is short."""
    times = np.array([round(number * 1001 / 30) for number in range(60)])
    chosen = on_display(times, Fraction(60, int(times[-1]) + last), np.arange(60))
    assert chosen[:30].tolist() == list(range(30))


def test_a_frame_that_is_shown_long_is_chosen_several_times() -> None:
    """A slide show: frame 1 stays for three of four seconds."""
    data = clip("libx264", 5, 10, times=[0, 5, 35, 36, 37], time_base=Fraction(1, 10), container="matroska")
    made, frames = sampled(data, [0, 1, 2, 3, 4])
    assert [number_of(pixels) for pixels in frames] == made.numbers.tolist() == [0, 1, 1, 1, 1]
    assert np.allclose(made.seconds, [0, 0.5, 0.5, 0.5, 0.5])


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("codec", sorted({*KINDS} - {"mpeg2video"}))  # FFmpeg opens no transport stream that short
def test_the_shortest_clips(codec: str, count: int) -> None:
    contents = read_contents(clip(codec, count))
    assert len(contents) == count
    if count > 1 or codec != "gif":  # the only frame of a GIF tells no rate
        assert float(contents.rate) == pytest.approx(30, rel=0.12)  # GIF counts hundredths of a second
    assert [number_of(pixels) for pixels in sampled(clip(codec, count), list(range(count)))[1]] == list(range(count))


@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
def test_frames_are_turned_as_the_file_says(degrees: int) -> None:
    plain, turned = (sampled(clip("libx264", 3, rotation=angle), [1])[1][0] for angle in (None, degrees))
    assert np.array_equal(turned, np.rot90(plain, degrees // 90))
    contents = read_contents(clip("libx264", 3, rotation=degrees))
    assert contents.size == turned.shape[:2]
    assert contents.file_size == (48, 64)


def test_frames_are_mirrored_as_the_file_says() -> None:
    noise = [np.random.default_rng(n).integers(0, 256, (48, 64, 3), np.uint8) for n in range(2)]
    files = {
        flip: clip("ffv1", 2, container="mp4", frames=noise, rotation=0, mirrored=flip)
        for flip in ((False, False), (True, False), (False, True))
    }
    plain, across, down = (sampled(data, [1])[1][0] for data in files.values())
    assert np.array_equal(across, plain[:, ::-1])
    assert np.array_equal(down, plain[::-1])


def test_a_turn_by_another_angle_is_refused() -> None:
    with pytest.raises(Exception, match=r"unsupported_video: video: the file asks to turn its frames by \S+ degrees"):
        read_contents(clip("libx264", 2, rotation=30))


@pytest.mark.parametrize(("codec", "pixels"), [("libx264", "yuv444p"), ("ffv1", "yuv420p"), ("libvpx-vp9", "yuv420p")])
def test_odd_sizes(codec: str, pixels: str) -> None:
    data = clip(codec, 5, size=(49, 65), pixels=pixels, container="matroska")
    assert read_contents(data).size == (49, 65)
    assert [number_of(frame) for frame in sampled(data, [0, 4])[1]] == [0, 4]


def test_ten_bits_and_hdr_are_decoded_and_recorded() -> None:
    flat = [np.full((48, 64, 3), (200, 100, 50), np.uint8)] * 2
    for name, transfer, expected in (("pq", 16, {"hdr": "pq"}), ("hlg", 18, {"hdr": "hlg"}), ("sdr", 1, {})):
        data = clip("libx265", 2, pixels="yuv420p10le", frames=flat, context={"color_trc": transfer})
        assert read_contents(data).colour == {"pixels": "yuv420p10le"} | expected, name
        assert np.abs(sampled(data, [1])[1][0].astype(int) - flat[0]).max() <= 4


def test_interlaced_files_are_recorded_and_keep_their_lines() -> None:
    stripes = np.zeros((48, 64, 3), np.uint8)
    stripes[::2] = 255
    data = clip("libx264", 4, frames=[stripes] * 4, options={"x264-params": "interlaced=1", "qp": "4"})
    assert read_contents(data).colour["interlaced"] is True
    assert np.abs(sampled(data, [2])[1][0].astype(int) - stripes).mean() < 16


def test_the_matrix_and_range_of_the_file_are_used() -> None:
    flat = [np.full((48, 64, 3), (200, 40, 40), np.uint8)] * 2
    full = clip("mjpeg", 2, frames=flat, options={"q:v": "1"})
    assert np.abs(sampled(full, [1])[1][0].astype(int) - flat[0]).max() <= 8


def test_transparent_pixels_are_white() -> None:
    drawn = Image.new("RGBA", (64, 48), (255, 0, 0, 255))
    drawn.paste((0, 0, 0, 0), (0, 24, 64, 48))
    file = BytesIO()
    drawn.save(file, "GIF", save_all=True, append_images=[drawn.rotate(180)], duration=100, disposal=2)
    shown = sampled(file.getvalue(), [0])[1][0]
    assert (shown[:24] == (255, 0, 0)).all()
    assert (shown[24:] == 255).all()


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Times of the frames that are decoded, if not all from the start."""
    times: list[int] = []
    real = decoding._Skipping.__iter__

    def noting(self: decoding._Skipping) -> Iterator[av.VideoFrame]:
        for frame in real(self):
            times.append(frame.pts)
            yield frame

    monkeypatch.setattr(decoding._Skipping, "__iter__", noting)
    return times


def test_a_long_file_is_decoded_only_near_the_frames(decoded: list[int]) -> None:
    for container in ("mp4", "matroska", "mpegts"):
        data = clip("libx264", 3000, options={"g": "25", "preset": "ultrafast"}, container=container)
        decoded.clear()
        indices = [3, 700, 701, 1500, 2999]
        assert [number_of(pixels) for pixels in sampled(data, indices)[1]] == [index % 256 for index in indices]
        assert 0 < len(decoded) < 5 * 30


def cut(data: bytes, first: int, container: str) -> bytes:
    """Copies the packets of a file from a number on, as cutting without encoding does."""
    out = BytesIO()
    with av.open(BytesIO(data)) as source, av.open(out, "w", format=container) as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for number, packet in enumerate(packet for packet in source.demux(video=0) if packet.size):
            if number >= first:
                packet.stream = stream
                target.mux(packet)
    return out.getvalue()


@pytest.mark.parametrize("container", ["matroska", "mp4"])
@pytest.mark.parametrize(
    ("codec", "options"),
    [
        ("libx264", {"g": "12", "x264-params": "open-gop=1"}),
        ("libx265", {"x265-params": "log-level=none:keyint=12:min-keyint=12:open-gop=1:bframes=3"}),
        ("mpeg2video", {"g": "12"}),
    ],
)
def test_a_file_cut_between_key_frames_begins_at_the_next_one(
    codec: str, options: dict[str, str], container: str
) -> None:
    whole = clip(codec, 60, 30, options=options)
    _, frames = sampled(whole, list(range(60)))
    for first in (5, 12, 24):
        data = cut(whole, first, container)
        contents = read_contents(data)
        count = len(contents)
        made, left = sampled(data, list(range(count)))
        assert made.seconds[0] == 0
        assert [number_of(pixels) for pixels in left] == list(range(60 - count, 60))
        assert all(np.array_equal(one, other) for one, other in zip(left, frames[-count:], strict=True))
        assert 60 - 12 - first - 4 < count <= 60 - first
        with av.open(BytesIO(data)) as file:
            packets = sum(packet.size > 0 for packet in file.demux(video=0))
        assert len(contents.leading) == packets - count


def test_times_of_decoding_are_no_times_of_presentation() -> None:
    """B frames in a file whose writer knew none, as that of opencv-doc's box.mp4, which also has a unit of no type."""
    data, out = clip("libx264", 40, 25, options={"g": "12", "bf": "3"}), BytesIO()
    with av.open(BytesIO(data)) as source, av.open(out, "w", format="mp4") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for number, packet in enumerate(packet for packet in source.demux(video=0) if packet.size):
            packet.stream, packet.time_base = stream, Fraction(1, 25)
            packet.pts = packet.dts = number
            target.mux(packet)
    contents = read_contents(out.getvalue())
    assert (len(contents), contents.rate) == (40, 25)
    made, frames = sampled(out.getvalue(), [0, 7, 8, 39])
    assert [number_of(pixels) for pixels in frames] == [0, 7, 8, 39]
    assert made.seconds.tolist() == [0, 0.28, 0.32, 1.56]


def test_a_unit_that_is_no_picture_is_no_damage() -> None:
    data = bytearray(clip("libx264", 20, options={"g": "5"}, frames=[picture(n) for n in range(20)]))
    before = sampled(bytes(data), list(range(20)))[1]
    at = data.index(b"x264 - core") - 24
    at = data.index(b"\x06\x05", at)  # the message with the encoder's options
    data[at] = 0x05
    after = sampled(bytes(data), list(range(20)))[1]
    assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))


def test_frames_to_which_no_other_refers_are_decoded_only_if_needed(decoded: list[int]) -> None:
    data = clip("libx264", 60, options={"g": "60", "bf": "3", "sc_threshold": "0"})
    wanted = [0, 1, 2, 31, 59]
    frames = sampled(data, wanted)[1]
    assert 0 < len(decoded) < 50
    whole = sampled(data, list(range(60)))[1]
    assert all(np.array_equal(frame, whole[number]) for frame, number in zip(frames, wanted, strict=True))


def test_packets_of_codecs_without_b_frames_are_not_decoded_to_be_counted() -> None:
    contents = read_contents(file_of("mjpeg"))
    assert contents.container == "avi"
    assert contents.starts is not None
    assert contents.shown_at(np.arange(40)).tolist() == list(range(40))
    assert read_contents(file_of("mpeg4")).starts is None


@pytest.mark.parametrize("pixels", ["yuv420p", "yuvj422p", "yuv444p10le", "nv12", "gray"])
def test_colours_by_way_of_planes_are_those_of_direct_conversion(pixels: str) -> None:
    random, frame = np.random.default_rng(0), av.VideoFrame(66, 50, pixels)
    for plane in frame.planes:
        values = random.integers(0, 256, plane.buffer_size, np.uint8)
        if pixels.endswith("10le"):
            values.view("<u2")[:] &= 1023
        plane.update(values.tobytes())
    made, direct = Pictures("video"), Pictures("video")
    wanted = direct._converted(direct._reformatter, frame, "rgb24").to_ndarray()
    assert np.array_equal(made.rgb(frame), wanted)


def test_sound_is_not_needed_and_not_in_the_way() -> None:
    data = clip("libx264", 10, container="matroska", sound=True)
    contents = read_contents(data)
    assert len(contents) == 10
    assert contents.rate == 30


def test_the_versions_that_decide_the_pixels_are_told() -> None:
    versions = video_versions()
    assert versions["av"] == av.__version__
    assert versions["ffmpeg"][0].isdigit()
    assert {"libavcodec", "libavformat", "libavutil", "libswscale"} < set(versions)
