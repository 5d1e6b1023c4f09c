"""Settings of videos that differ between datasets, and between a dataset and the processor of a model, are named."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from tests.chat_rows import write_jsonl
from tests.loader.test_config import run as run  # the fixture
from tests.media.video.clips import clip
from vlmdata import open_dataset
from vlmdata.families.chat import VIDEO
from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import KIND_FEATURES
from vlmdata.integrations.videos import has_videos, processor_notes, served, video_notes
from vlmdata.preprocess.config import PreprocessConfig, VideoConfig, VideoLayout, VideoSampler
from vlmdata.preprocess.run.dataset import preprocess_dataset
from vlmdata.preprocess.sources.open import open_source

PUBLISHED = {"shortest_edge": 4096, "longest_edge": 25_165_824}


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Of a dataset of one clip, with the defaults."""
    folder = tmp_path_factory.mktemp("clip")
    (folder / "a.mp4").write_bytes(clip("libx264", 5, 2))
    turns = [{"role": "user", "content": "<video>What?"}, {"role": "assistant", "content": "It."}]
    rows = write_jsonl(folder / "rows.jsonl", [{"messages": turns, "videos": ["a.mp4"]}])
    preprocess_dataset(open_source(str(rows)), folder / "out", PreprocessConfig(recipe="chat", max_length=1 << 16))
    return open_dataset(folder / "out").manifest


def with_options(manifest: Manifest, config: VideoConfig) -> Manifest:
    """The same as if it had been made with other options."""
    made = config.to_json(manifest.model_family, PreprocessConfig().codec)
    options = {**manifest.config["options"], "video": made}
    return dataclasses.replace(manifest, config={**manifest.config, "options": options})


def processor(**settings: Any) -> Any:
    from transformers import Qwen3VLVideoProcessor

    return Qwen3VLVideoProcessor(**{"size": PUBLISHED} | settings)


def test_the_published_processor_is_that_of_the_defaults(manifest: Manifest) -> None:
    assert has_videos(manifest)
    assert processor_notes("data", manifest, processor()) == []


def test_a_processor_that_limits_each_frame_is_named(manifest: Manifest, tmp_path: Path) -> None:
    (note,) = processor_notes("data", manifest, processor(cap_pixels_per_frame=True), "theirs")
    assert "data has cap_pixels_per_frame off, and the processor of theirs has cap_pixels_per_frame on." in note
    capped = with_options(manifest, VideoConfig(cap_pixels_per_frame=True))
    assert processor_notes("data", capped, processor(cap_pixels_per_frame=True)) == []
    assert "cap_pixels_per_frame on, and" in processor_notes("data", capped, processor())[0]
    processor(cap_pixels_per_frame=True).save_pretrained(tmp_path)
    assert video_notes([("data", manifest)], str(tmp_path)) == [note.replace("theirs", str(tmp_path))]
    assert video_notes([("data", manifest)], str(tmp_path / "none")) == []


@pytest.mark.parametrize("name", ["Qwen3VLVideoProcessor", "Qwen2VLVideoProcessor"])
def test_processors_without_the_setting_tell_by_the_sizes_they_give(
    name: str, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier ones never limit a frame; of later ones, transformers announced that they always do."""
    kind = getattr(transformers, name)
    monkeypatch.delattr(kind, "cap_pixels_per_frame", raising=False)
    resize = kind.resize
    for always in (False, True):
        monkeypatch.setattr(
            kind, "resize", lambda *args, always=always, **kw: resize(*args, **kw | {"cap_pixels_per_frame": always})
        )
        assert served(kind())["cap_pixels_per_frame"] is always
        assert ("cap_pixels_per_frame off" in " ".join(processor_notes("data", manifest, kind()))) is always


def test_what_has_no_such_sizes_limits_no_frame() -> None:
    assert not served(SimpleNamespace())["cap_pixels_per_frame"]
    assert not served(SimpleNamespace(size={"height": 448, "width": 448}))["cap_pixels_per_frame"]


@given(
    fps=st.sampled_from([1.0, 2.0]),
    max_frames=st.sampled_from([16, 768]),
    most=st.sampled_from([1_000_000, 25_165_824]),
    cap=st.booleans(),
)
def test_the_notes_name_exactly_what_differs(
    manifest: Manifest, fps: float, max_frames: int, most: int, cap: bool
) -> None:
    asked = VideoConfig(fps=fps, max_frames=max_frames, max_pixels=most, cap_pixels_per_frame=cap)
    notes = processor_notes("data", with_options(manifest, asked), processor())
    wanted = {"fps": fps != 2.0, "max_frames": max_frames != 768, "max_pixels": most != 25_165_824}
    wanted["cap_pixels_per_frame"] = cap
    assert len(notes) == any(wanted.values())
    for name, differs in wanted.items():
        assert (f"{name} " in "".join(notes)) == differs
    same = processor(fps=fps, max_frames=max_frames, cap_pixels_per_frame=cap, size=PUBLISHED | {"longest_edge": most})
    assert processor_notes("data", with_options(manifest, asked), same) == []


def test_datasets_of_two_servers_are_named(manifest: Manifest) -> None:
    vllm = with_options(manifest, VideoConfig(layout=VideoLayout.VLLM))
    utils = with_options(manifest, VideoConfig(sampler=VideoSampler.QWEN_VL_UTILS))
    assert video_notes([("a", manifest), ("b", with_options(manifest, VideoConfig(fps=1.0)))]) == []
    (note,) = video_notes([("a", manifest), ("b", vllm)])
    assert note.startswith("videos: a has layout transformers, and b has layout vllm; a model is served with one of")
    (note,) = video_notes([("a", utils), ("b", manifest)])
    assert "a has sampler qwen-vl-utils, and b has sampler transformers" in note
    assert processor_notes("a", utils, processor(cap_pixels_per_frame=True)) == []
    others = tuple(each for each in vllm.features if each != KIND_FEATURES[VIDEO])
    assert video_notes([("a", manifest), ("b", dataclasses.replace(vllm, features=others))]) == []


def test_a_manifest_that_was_read_is_compared(manifest: Manifest) -> None:
    read = Manifest.from_json(manifest.to_json(), "manifest.json")
    assert json.loads(manifest.to_json())["config"]["options"]["video"]["cap_pixels_per_frame"] is False
    assert len(processor_notes("data", read, processor(fps=1))) == 1


def test_plan_names_datasets_of_two_servers(tmp_path: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    (tmp_path / "a.mp4").write_bytes(clip("libx264", 5, 2))
    turns = [{"role": "user", "content": "<video>What?"}, {"role": "assistant", "content": "It."}]
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"messages": turns, "videos": ["a.mp4"]}])
    for name in ("off", "on"):
        config = PreprocessConfig(recipe="chat", video=VideoConfig(max_pixels=8192, cap_pixels_per_frame=name == "on"))
        preprocess_dataset(open_source(str(rows)), tmp_path / name, config)
    off, on, capacity = str(tmp_path / "off"), str(tmp_path / "on"), ("--capacity", "1024")
    (note,) = json.loads(run("plan", off, on, *capacity, "--json")[1])["notes"]
    assert note.startswith(f"videos: {off} has cap_pixels_per_frame off, and {on} has cap_pixels_per_frame on;")
    assert "one of them. Preprocess both alike" in " ".join(run("plan", off, on, *capacity)[1].split())
    assert json.loads(run("plan", off, off, *capacity, "--json")[1])["notes"] == []
