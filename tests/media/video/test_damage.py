"""Files that are incomplete, damaged, empty, too large or no videos."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Mapping
from functools import cache
from io import BytesIO
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from tests.media.video.clips import clip, number_of, picture, without_frames
from tests.media.video.test_frames import sampled
from vlmdata.media.error import MediaError
from vlmdata.media.video import read_contents, sample_video
from vlmdata.media.video.container import VideoLimits
from vlmdata.reasons import Reason

KEEP = VideoLimits(keep_damaged=True)


def refusal(data: bytes | Path, limits: VideoLimits = VideoLimits()) -> MediaError:
    with pytest.raises(MediaError) as caught:
        read_contents(data, limits, "videos[2]")
    assert caught.value.message.startswith("videos[2]: ")
    return caught.value


def noisy(codec: str, **options: object) -> bytes:
    """90 frames of 3 s with noise, so that pixels are most of the file."""
    random = np.random.default_rng(0)
    frames = [
        np.clip(picture(n, 96, 64).astype(int) + random.integers(-60, 60, (64, 96, 3)), 0, 255).astype(np.uint8)
        for n in range(90)
    ]
    return clip(codec, 90, size=(64, 96), frames=frames, **{"options": {"g": "10"}, **options})


CUT: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "mkv": ("libx264", {"container": "matroska"}),
    "webm": ("libvpx-vp9", {}),
    "mp4": ("libx264", {"muxer": {"movflags": "faststart"}}),
    "fragmented": ("libx264", {"muxer": {"movflags": "frag_keyframe+empty_moov"}}),
    "avi": ("mpeg4", {"context": {"bit_rate": 10**7}}),
    "mjpeg": ("mjpeg", {}),
    "gif": ("gif", {}),
    "hevc": ("libx265", {"muxer": {"movflags": "faststart"}}),
    "flv": ("libx264", {"container": "flv"}),
}


@cache
def whole_file(kind: str) -> bytes:
    """The file of :data:`CUT`, encoded once when a test needs it."""
    codec, options = CUT[kind]
    return noisy(codec, **options)


@pytest.mark.parametrize("kind", CUT)
@pytest.mark.parametrize("part", [0.6, 0.8, 0.97])
def test_an_incomplete_file_is_refused_or_used_up_to_its_end(kind: str, part: float) -> None:
    whole = whole_file(kind)
    data = whole[: int(len(whole) * part)]
    error = refusal(data)
    assert error.reason is Reason.DAMAGED_VIDEO
    assert "--damaged-videos keep" in error.message
    kept = read_contents(data, KEEP)
    assert 90 * part * 0.3 < len(kept) <= 90
    assert kept.damage
    made, frames = sampled(data, list(range(len(kept))), keep_damaged=True)
    left = len(made.contents)
    assert [number_of(pixels) for pixels in frames[:left]] == list(range(left))


@pytest.mark.parametrize("kind", ["mp4", "hevc", "mkv"])
def test_a_tail_of_zeros_is_damage(kind: str) -> None:
    """As downloads leave files that reserve their space first."""
    whole = whole_file(kind)
    data = whole[: len(whole) * 3 // 4].ljust(len(whole), b"\0")
    with pytest.raises(MediaError, match="damaged_video"):
        sampled(data, [0, 10, 85])
    seen: list[int] = []

    def begin(contents: object, indices: np.ndarray) -> object:
        seen.clear()
        return lambda place, pixels: seen.append(number_of(pixels))

    made = sample_video(data, lambda contents: np.arange(len(contents))[::3], begin, KEEP)
    assert 20 < len(made.contents) < 90
    assert made.contents.damage
    assert seen == made.numbers.tolist() == list(range(0, len(made.contents), 3))


def test_damage_that_no_chosen_frame_needs_is_not_read() -> None:
    data = bytearray(whole_file("mp4"))
    with av.open(BytesIO(data)) as file:
        packet = [packet for packet in file.demux() if packet.size][45]
    data[packet.pos + 20 : packet.pos + packet.size] = bytes(packet.size - 20)
    with pytest.raises(MediaError, match=r"damaged_video: video: frame 4\d does not decode"):
        sampled(bytes(data), list(range(90)))
    made, frames = sampled(bytes(data), [0, 89])
    assert [number_of(pixels) for pixels in frames] == [0, 89]
    assert made.contents.damage == ""


def test_a_file_without_its_index_is_refused() -> None:
    data = clip("libx264", 20)
    error = refusal(data[: len(data) // 2], KEEP)
    assert error.reason is Reason.DAMAGED_VIDEO
    assert "bytes that does not open" in error.message


def test_a_header_that_overstates_the_frames_is_not_trusted() -> None:
    data = bytearray(clip("mjpeg", 40))
    at = data.index(b"avih") + 8 + 16
    assert struct.unpack_from("<I", data, at)[0] == 40
    struct.pack_into("<I", data, at, 400)
    at = data.index(b"strh") + 8 + 32
    assert struct.unpack_from("<I", data, at)[0] == 40
    struct.pack_into("<I", data, at, 400)
    contents = read_contents(bytes(data))
    assert contents.declared_frames == 400
    assert len(contents) == 40
    assert contents.rate == 30


def test_a_file_without_frames() -> None:
    error = refusal(without_frames())
    assert error.reason is Reason.EMPTY_VIDEO
    assert error.message.endswith("avi with mjpeg has no frames")


def image_file() -> bytes:
    file = BytesIO()
    Image.new("RGB", (64, 48)).save(file, "JPEG")
    return file.getvalue()


def sound_file() -> bytes:
    file = BytesIO()
    with av.open(file, "w", format="matroska") as out:
        track = out.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        frame.sample_rate, frame.pts = 8000, 0
        out.mux(track.encode(frame))
        out.mux(track.encode())
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "reason", "message"),
    [
        (b"", Reason.EMPTY_VIDEO, "the file has 0 bytes"),
        (b"\x00\x01\x02\x03" * 99, Reason.NOT_A_VIDEO, "396 bytes, not a video that can be opened; they begin with"),
        (b"<html><body>404</body></html>", Reason.NOT_A_VIDEO, "a web page (HTML)"),
        (b"version https://git-lfs.github.com/spec/v1\n", Reason.NOT_A_VIDEO, "a Git LFS pointer"),
        (b"a/b/c.mp4", Reason.NOT_A_VIDEO, "text: 'a/b/c.mp4'"),
        (
            image_file(),
            Reason.NOT_A_VIDEO,
            "bytes), not a video. Name it as an image, or as frames of a video in a list with fps.",
        ),
        (sound_file(), Reason.NOT_A_VIDEO, "matroska,webm with audio only, no video"),
    ],
)
def test_what_is_not_a_video(data: bytes, reason: Reason, message: str) -> None:
    error = refusal(data)
    assert error.reason is reason
    assert message in error.message


def test_a_playlist_cannot_open_other_files(tmp_path: Path) -> None:
    (tmp_path / "secret.mp4").write_bytes(clip("libx264", 5))
    lists = {
        "a.m3u8": "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nsecret.mp4\n#EXT-X-ENDLIST\n",
        "a.ffconcat": "ffconcat version 1.0\nfile secret.mp4\n",
    }
    for name, text in lists.items():
        path = tmp_path / name
        path.write_text(text)
        assert av.open(str(path)).streams.video if name == "a.ffconcat" else True  # FFmpeg would open it
        assert refusal(path).reason is Reason.NOT_A_VIDEO


def test_frames_over_the_limit_are_refused_undecoded() -> None:
    error = refusal(clip("libx264", 2, size=(480, 640)), VideoLimits(max_source_pixels=300_000))
    assert error.reason is Reason.VIDEO_TOO_LARGE
    assert "frames of 640x480 = 307200 pixels, over the limit of 300000 (--max-source-pixels)" in error.message


def test_frames_that_change_size_are_refused() -> None:
    parts = [clip("libx264", 5, size=size, container="h264") for size in ((48, 64), (96, 64))]
    with pytest.raises(MediaError, match="its frames change from 64x48 to 64x96 pixels; split the file"):
        sampled(b"".join(parts), [0, 9])


def test_a_file_with_a_part_of_its_first_frames_has_none() -> None:
    """The second frame is shown before others that are missing, so not even the first is certain to come next."""
    with av.open(BytesIO(whole_file("mp4"))) as file:
        second = [packet for packet in file.demux() if packet.size][1]
    error = refusal(whole_file("mp4")[: second.pos + 40], KEEP)
    assert error.reason is Reason.DAMAGED_VIDEO


@pytest.mark.parametrize("codec", ["libx264", "libsvtav1"])
def test_a_second_file_after_the_first_is_not_passed_over(codec: str) -> None:
    """FFmpeg reads the first alone, and says nothing."""
    first, second = clip(codec, 8), clip(codec, 20)
    assert len(read_contents(first)) == 8
    with pytest.raises(MediaError, match=r"another MP4 file follows with its header at byte [\d,]+, and is not read"):
        read_contents(first + second)
    assert read_contents(first + second, VideoLimits(keep_damaged=True)).damage


@pytest.mark.parametrize("damage", [bytes(40), b"\xa5" * 40, b"\0\0\0\x64\0\0\0\0"], ids=["zeros", "noise", "no type"])
def test_a_fragment_with_a_damaged_header_is_not_passed_over(damage: bytes) -> None:
    """FFmpeg leaves the fragment out, or reads up to it, and says nothing."""
    data = bytearray(clip("libx264", 60, 10, options={"g": "10"}, muxer={"movflags": "frag_keyframe+empty_moov"}))
    at = [found.start() - 4 for found in re.finditer(b"moof", data)][3]
    data[at : at + len(damage)] = damage
    with pytest.raises(MediaError, match=f"byte {at:,} should begin a fragment or another box, and does not"):
        read_contents(bytes(data))
    before = read_contents(bytes(data[:at]))
    kept = read_contents(bytes(data), KEEP)
    assert len(before) - 3 <= len(kept) <= len(before)  # what is shown after a missing packet is not certain
    assert kept.times.tolist() == before.times[: len(kept)].tolist()


@pytest.mark.parametrize("tail", [bytes(1000), b"\xa5" * 1000])
def test_what_follows_all_boxes_of_a_file_with_an_index_is_no_damage(tail: bytes) -> None:
    assert len(read_contents(clip("libx264", 8) + tail)) == 8


def claiming(data: bytes, kind: bytes, at: int, count: int) -> bytes:
    """A file of which the first box of a kind has another number there."""
    place = data.index(kind) + 4 + at
    return data[:place] + count.to_bytes(4) + data[place + 4 :]


def test_more_samples_than_the_file_has_bytes_are_refused_before_an_index_is_made() -> None:
    whole, parts = clip(count=8), clip(count=8, muxer={"movflags": "frag_keyframe+empty_moov+default_base_moof"})
    many = 40_000_000
    sized = claiming(claiming(whole, b"stsz", 4, 1), b"stsz", 8, many)  # of one byte each, which takes no table
    timed = claiming(claiming(whole, b"stts", 4, 1), b"stts", 8, many)
    for data in (sized, timed, claiming(sized, b"stts", 8, many), claiming(parts, b"trun", 4, many)):
        path = str(refusal(data))
        assert f"its header claims {many:,} samples" in path
        assert f"and it has {len(data):,} bytes" in path
    # The header may be compressed, and boxes may have lengths of 64 bits, or none.
    begin = sized.index(b"moov") - 4
    length = int.from_bytes(sized[begin : begin + 4])
    before, header, after = sized[:begin], sized[begin : begin + length], sized[begin + length :]
    for other in (
        before + (1).to_bytes(4) + b"moov" + (length + 8).to_bytes(8) + header[8:] + after,
        before + after + (0).to_bytes(4) + header[4:],
        before + box(b"moov", box(b"cmov", box(b"cmvd", length.to_bytes(4) + zlib.compress(header)))) + after,
    ):
        assert "its header claims" in str(refusal(other))


def box(kind: bytes, content: bytes) -> bytes:
    """A box of an MP4 file."""
    return (8 + len(content)).to_bytes(4) + kind + content


@pytest.mark.parametrize("codec", ["pcm_s16le", "pcm_u8", "adpcm_ima_qt", "aac"])
def test_sound_may_have_more_samples_than_bytes(codec: str) -> None:
    file = BytesIO()
    with av.open(file, "w", format="mov") as container:
        stream = container.add_stream(codec, rate=8000, layout="mono")
        video = container.add_stream("libx264", rate=30)
        video.width, video.height = 64, 48
        for number in range(4):
            container.mux(video.encode(av.VideoFrame.from_ndarray(picture(number), "rgb24")))
        size = stream.codec_context.frame_size or 1024
        for number in range(40):
            sound = av.AudioFrame(stream.codec_context.format.name, "mono", size)
            sound.sample_rate, sound.pts = 8000, number * size
            for plane in sound.planes:
                plane.update(bytes(plane.buffer_size))
            container.mux(stream.encode(sound))
        container.mux(stream.encode(None))
        container.mux(video.encode(None))
    assert len(read_contents(file.getvalue())) == 4
