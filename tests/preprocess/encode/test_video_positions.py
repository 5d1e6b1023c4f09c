"""Positions of videos that are spaced by time: whole seconds or fractions count, and a dataset records which."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from tests.chat_rows import write_jsonl
from tests.media.video.clips import clip
from vlmdata import open_dataset
from vlmdata.errors import ConfigMismatchError, UsageError
from vlmdata.families import family
from vlmdata.integrations.videos import video_notes
from vlmdata.preprocess import media_config
from vlmdata.preprocess.config import PreprocessConfig, VideoConfig, VideoPositions
from vlmdata.preprocess.recode.old_dataset import OldDataset
from vlmdata.preprocess.retokenize.run import old_config
from vlmdata.preprocess.run.dataset import preprocess_dataset
from vlmdata.preprocess.sources.open import open_source
from vlmdata.storage.join import join_datasets
from vlmdata.verify.dataset import verify_dataset

WHOLE, FRACTIONS = VideoPositions.WHOLE_SECONDS, VideoPositions.FRACTIONS


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clip of three seconds, of which two frames a second are sampled: a patch shows one second."""
    folder = tmp_path_factory.mktemp("rows")
    (folder / "a.mp4").write_bytes(clip("libx264", 15, 5))
    turns = [{"role": "user", "content": "<video>What?"}, {"role": "assistant", "content": "It."}]
    return write_jsonl(folder / "rows.jsonl", [{"messages": turns, "videos": ["a.mp4"]}])


def made(rows: Path, out: Path, positions: VideoPositions | None, fps: float = 4.0) -> Path:
    video = VideoConfig(fps=fps, min_pixels=3136, max_pixels=9000, positions=positions)
    config = PreprocessConfig(recipe="chat", family="qwen2_5_vl", video=video)
    preprocess_dataset(open_source(str(rows)), out, config)
    return out


@pytest.fixture(scope="module")
def datasets(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[VideoPositions, Path]:
    folder = tmp_path_factory.mktemp("datasets")
    return {each: made(rows, folder / each, each) for each in VideoPositions}


def times(at: Path) -> list[int]:
    """The distinct positions of the video in time, from the first."""
    sample, (start,) = open_dataset(at)[0], open_dataset(at).index.row(0).item_starts
    assert sample.video_grid_thw is not None
    t, h, w = sample.video_grid_thw[0].tolist()
    found: list[int] = sample.position_ids[0, start : start + t * h * w // 4 : h * w // 4].tolist()
    return [each - found[0] for each in found]


def test_both_are_recorded_and_audited(datasets: dict[VideoPositions, Path]) -> None:
    assert times(datasets[WHOLE]) == [0] * 6
    assert times(datasets[FRACTIONS]) == [0, 1, 2, 3, 4, 5]
    manifests = {each: open_dataset(at).manifest for each, at in datasets.items()}
    assert {each: made.counts_fractions for each, made in manifests.items()} == {WHOLE: False, FRACTIONS: True}
    assert "positions" not in manifests[WHOLE].video_options  # as in datasets of older versions
    assert [verify_dataset(at).faults for at in datasets.values()] == [[], []]


def test_an_audit_by_the_other_rule_finds_faults(
    datasets: dict[VideoPositions, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlmdata.format.manifest.Manifest.counts_fractions", False)
    assert [fault.check for fault in verify_dataset(datasets[FRACTIONS]).faults] == ["positions"]


def test_the_default_is_that_of_the_installed_transformers(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, datasets: dict[VideoPositions, Path]
) -> None:
    for each, same in datasets.items():
        monkeypatch.setattr(media_config, "positions_of_transformers", lambda each=each: each)
        assert (made(rows, tmp_path / each, None) / "manifest.json").read_bytes() == (
            same / "manifest.json"
        ).read_bytes()
    monkeypatch.setattr(media_config, "positions_of_transformers", lambda: FRACTIONS)
    assert old_config(OldDataset.open(str(datasets[WHOLE]))).video.positions is WHOLE
    with pytest.raises(ConfigMismatchError, match=r"config\.options\.video\.positions"):
        made(rows, tmp_path / WHOLE, None)


def test_datasets_of_both_are_not_joined_and_plans_name_them(
    datasets: dict[VideoPositions, Path], tmp_path: Path
) -> None:
    whole, fractions = str(datasets[WHOLE]), str(datasets[FRACTIONS])
    with pytest.raises(ConfigMismatchError, match=r"--video-positions: whole-seconds in .*, fractions in "):
        join_datasets([whole, fractions], tmp_path / "joined")
    notes = video_notes([(at, open_dataset(at).manifest) for at in (whole, fractions)])
    assert [re.findall(r"has positions ([a-z-]+)", note) for note in notes] == [["whole-seconds", "fractions"]]


def test_other_families_have_no_such_option() -> None:
    codec = PreprocessConfig().codec
    with pytest.raises(UsageError, match=r"--video-positions fractions has no effect in the family qwen3_5; drop it"):
        VideoConfig(positions=FRACTIONS).to_json(family("qwen3_5"), codec)
    assert "positions" not in (VideoConfig().to_json(family("qwen3_5"), codec) or {})


def test_a_transformers_that_cannot_be_asked_needs_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*_: object, **__: object) -> None:
        raise TypeError("other arguments")

    monkeypatch.setattr("transformers.Qwen2_5_VLModel.get_rope_index", other)
    ask = media_config.positions_of_transformers.__wrapped__
    with pytest.raises(UsageError, match=r"\(other arguments\); give --video-positions"):
        ask()


def test_options_in_code_are_copied_with_the_rule() -> None:
    config = PreprocessConfig(family="qwen2_5_vl", video=VideoConfig(positions=FRACTIONS))
    assert PreprocessConfig.from_json(config.to_json()).video.positions is FRACTIONS
    assert PreprocessConfig.from_json(dataclasses.replace(config, family="qwen3_5", video=VideoConfig()).to_json())
