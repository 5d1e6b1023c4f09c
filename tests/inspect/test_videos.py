"""Videos as strips of frames with their times, in the terminal, the page and the server."""

from __future__ import annotations

import base64
import io
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.inspect.browser import Visit
from tests.inspect.clips import write_clips
from tests.inspect.conftest import Command
from tests.inspect.serving import serving
from tests.inspect.test_page import parsed
from tests.media.video.clips import number_of
from vlmdata.errors import NotFoundError
from vlmdata.format.dataset import VlmDataset
from vlmdata.inspect.frames import shown_frames
from vlmdata.inspect.sample import SampleDescriber, describe_sample, rebuild_image


@pytest.fixture(scope="module")
def clips(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clips(tmp_path_factory.mktemp("clips") / "data", demo)


def test_each_temporal_patch_has_its_tokens_and_times(clips: Path) -> None:
    dataset = VlmDataset(clips)
    sample, found = dataset[0], describe_sample(dataset, 0)
    info = dataset.manifest.tokenizer.items
    assert [image.kind for image in found.images] == ["image", "video", "image"]
    assert not found.images[0].frames
    assert not found.images[2].frames
    for kind in ("image", "video"):
        of_kind = [image for image in found.images if image.kind == kind]
        spans = [(f.start, f.tokens) for image in of_kind for f in (image.frames or (image,))]
        places = np.concatenate([np.arange(start, start + count) for start, count in spans])
        np.testing.assert_array_equal(places, np.flatnonzero(sample.input_ids[: sample.length] == info[kind].token))
    video = found.images[1]
    origin = dataset.metadata(0)["images"][1]
    assert len(video.frames) == video.grid[0] == 30
    assert [time for frame in video.frames for time in frame.seconds] == origin["seconds"]
    assert [number for frame in video.frames for number in frame.source] == origin["frames"]
    text = "".join(found.tokens.texts)
    for frame in video.frames:
        assert f"<{frame.told:.1f} seconds>" in text
        pixels = rebuild_image(sample, 1, dataset.family, frame.patch)
        assert number_of(pixels) == frame.source[0] % 256
    # Each span of placeholders belongs to its item.
    spans = [(span.image, span.stop - span.start) for span in found.spans if span.image is not None]
    assert [image for image, _ in spans] == [0, *[1] * 30, 2]
    assert sum(count for image, count in spans if image == 1) == video.tokens
    with pytest.raises(NotFoundError, match=r"no frame 30: video 1 of sample 0{9} has 30 temporal patches"):
        SampleDescriber(dataset).image(0, 1, 30)


def test_tokens_that_do_not_match_the_grids_are_still_shown(clips: Path) -> None:
    describe = SampleDescriber(VlmDataset(clips))
    sample = describe.dataset.as_stored(0)
    sample.input_ids.setflags(write=False)
    broken = sample.input_ids.copy()
    broken[np.flatnonzero(broken == describe.dataset.manifest.tokenizer.items["video"].token)[0]] = 7
    describe.dataset.as_stored = lambda *_, **__: type(sample)(**{**vars(sample), "input_ids": broken})  # type: ignore[method-assign]
    video = describe(0).images[1]
    starts = [frame.start for frame in video.frames]
    assert starts == [video.start + number * video.frames[0].tokens for number in range(30)]


def test_the_terminal_lists_times(clips: Path, command: Command) -> None:
    code, said, _ = command(clips, "--sample", 0)
    assert code == 0
    assert "1 (video)" in said
    assert "frames of video 1" in said
    assert "more (--json has them)" in said  # a long video does not fill the screen
    source = VlmDataset(clips).metadata(0)["images"][1]
    total, kept = source["file_frames"], len(set(source["frames"]))
    assert 0 < kept < total
    assert f"{total:,} in the file, {kept:,} kept, {total - kept:,} dropped" in " ".join(said.split())
    last = describe_sample(VlmDataset(clips), 0).images[1].frames[-1]
    assert f"{last.seconds[0]:.2f}, {last.seconds[1]:.2f} s" in said
    for more in (("--tokens",), ("--json",)):
        assert command(clips, "--sample", 1, *more)[0] == 0
    code, said, _ = command(clips)
    assert code == 0


def test_packs_show_videos(clips: Path, command: Command) -> None:
    dataset = VlmDataset(clips)
    code, said, _ = command(clips, "--pack", 0, "--cp", 2, "--capacity", 8192, "--json")
    assert code == 0
    images = json.loads(said)["images"]
    grids = {tuple(image["grid"]) for image in images}
    assert grids == {tuple(grid) for grid in dataset.index.grids.tolist()}
    assert [image["start"] for image in images] == sorted(image["start"] for image in images)


def test_the_page_holds_a_bounded_strip(clips: Path, tmp_path: Path, command: Command) -> None:
    assert command(clips, "--html", tmp_path / "page.html")[0] == 0
    blocks = {a.get("id"): text for tag, a, text in parsed(tmp_path / "page.html").inside if tag == "script"}
    image, video, _ = json.loads(blocks["sample-0"])["images"]
    assert image["src"].startswith("data:image/webp")
    assert "src" not in video
    assert [f["patch"] for f in video["frames"] if "src" in f] == shown_frames(30, 12)
    assert all(max(size_of(f["src"])) <= 384 for f in video["frames"] if "src" in f)
    assert (tmp_path / "page.html").stat().st_size < 2_000_000


def size_of(uri: str) -> tuple[int, int]:
    return Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).size


def test_frames_that_are_shown_are_spread() -> None:
    assert shown_frames(3, 12) == [0, 1, 2]
    assert shown_frames(30, 4) == [0, 10, 19, 29]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["file", "served"])
def test_a_token_marks_its_frame_and_a_frame_its_token(
    clips: Path, tmp_path: Path, command: Command, browser: Any, way: str
) -> None:
    video = describe_sample(VlmDataset(clips), 0).images[1]
    across = video.grid[2] // 2
    with ExitStack() as stack:
        if way == "file":
            assert command(clips, "--html", tmp_path / "page.html")[0] == 0
            url, shown = (tmp_path / "page.html").as_uri(), shown_frames(30, 12)
        else:
            url, shown = stack.enter_context(serving(clips)).home, list(range(30))
        visit = Visit(browser, url)
        visit.open_sample(0)
        page = visit.page
        frames = page.locator(".frames .picture")
        assert frames.count() == len(shown)
        page.wait_for_function("() => document.querySelector('.frames img')?.naturalWidth > 0")
        place = 2
        frame, picture = video.frames[shown[place]], frames.nth(place)
        picture.scroll_into_view_if_needed()
        box = picture.locator("svg").bounding_box()
        page.mouse.move(box["x"] + 1.5 / across * box["width"], box["y"] + 2)  # second column, first row
        assert visit.field("token") == f"{frame.start + 1:,}"
        assert visit.field("video").startswith(f"1, temporal patch {frame.patch} at {frame.seconds[0]:.2f} and ")
        # The mark is on that frame alone, and moves with the token under the pointer.
        marked = "[...document.querySelectorAll('.spot')].map((s) => s.getAttribute('visibility') === 'visible')"
        assert page.evaluate(marked).index(True) == 1 + place
        page.keyboard.press("u")
        page.hover(f".cell[data-i='{video.frames[0].start}']")
        assert [i for i, here in enumerate(page.evaluate(marked)) if here] == [1]
        caption = page.inner_text(".frames figcaption >> nth=0")
        total, kept = video.frame_counts or (0, 0)
        assert f"{kept} kept, {total - kept} dropped." in page.inner_text(".frames + figcaption >> nth=0")
        assert f"at {video.frames[0].seconds[0]:.2f} and {video.frames[0].seconds[1]:.2f} s" in caption
        assert "Cannot read" not in page.inner_text("body")
        visit.shot(f"video-{way}")
        assert visit.complaints == []
