"""Rows with videos, from files to the samples of a dataset: equal to what transformers' processors make."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.chat_rows import write_jsonl
from tests.conftest import encoded_image, tree_bytes
from tests.families.reference import FAMILIES, rope_index
from tests.media.video.clips import clip
from tests.preprocess.encode.test_videos import BOUNDS, IMAGES, LEAST_AND_MOST, of_the_processor
from tests.preprocess.run.runs import StopRun, stopping
from vlmdata import open_dataset
from vlmdata.errors import ConfigMismatchError, UsageError
from vlmdata.families.chat import IMAGE, VIDEO
from vlmdata.format.dataset import VlmDataset
from vlmdata.format.schema import MANIFEST_NAME, Sample
from vlmdata.media.versions import video_versions
from vlmdata.preprocess.config import ImageConfig, PreprocessConfig, TrainTurns, VideoConfig
from vlmdata.preprocess.recipes.chat import Chat
from vlmdata.preprocess.recipes.media import MediaLoader
from vlmdata.preprocess.recode.run import recode_dataset
from vlmdata.preprocess.row import Row
from vlmdata.preprocess.run.dataset import preprocess_dataset
from vlmdata.preprocess.sources.open import open_source
from vlmdata.verify.dataset import verify_dataset

ASK = "First <video>, then <image> and at last <video>. What changes?"
#: All rows are one conversation in other words, so that each has an image and two clips.
ROWS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "user", "content": f"{ASK} {number}"},
            {"role": "assistant", "content": "The light."},
            {"role": "user", "content": "And then?"},
            {"role": "assistant", "content": "Nothing."},
        ],
        "videos": ["long.mkv", "short.mkv"],
        "images": ["picture.png"],
    }
    for number in range(4)
]


def noise(count: int, rate: int, height: int, width: int) -> bytes:
    random = np.random.default_rng(count)
    frames = [random.integers(0, 256, (height, width, 3), np.uint8) for _ in range(count)]
    return clip("ffv1", count, rate, (height, width), frames=frames, pixels="yuv444p")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    (folder / "long.mkv").write_bytes(noise(30, 5, 48, 64))
    (folder / "short.mkv").write_bytes(noise(9, 2, 70, 34))
    (folder / "picture.png").write_bytes(encoded_image(150, 40, seed=1))
    return write_jsonl(folder / "rows.jsonl", ROWS)


def config(family: str = "qwen3_5", **options: Any) -> PreprocessConfig:
    least, most = BOUNDS.get(family, LEAST_AND_MOST)
    image, video = ImageConfig(*IMAGES.get(family, LEAST_AND_MOST)), VideoConfig(min_pixels=least, max_pixels=most)
    return PreprocessConfig(recipe="chat", family=family, image=image, video=video, rows_per_shard=2, **options)


def made(rows: Path, out: Path, options: PreprocessConfig) -> VlmDataset:
    preprocess_dataset(open_source(str(rows)), out, options)
    return open_dataset(out)


def assert_as_transformers(sample: Sample, dataset: VlmDataset, wanted: Any) -> None:
    family = dataset.manifest.family
    assert sample.input_ids[: sample.length].tolist() == wanted["input_ids"][0].tolist()
    assert [item.kind for item in sample.items] == [VIDEO, IMAGE, VIDEO]
    assert sample.image_grid_thw.tolist() == wanted["image_grid_thw"].tolist()
    assert sample.video_grid_thw is not None
    assert sample.video_grid_thw.tolist() == wanted["video_grid_thw"].tolist()
    pieces = np.split(sample.patches, np.cumsum([item.rows for item in sample.items]))[:-1]
    for kind, name in ((IMAGE, "pixel_values"), (VIDEO, "pixel_values_videos")):
        values = [
            dataset.family.pixel_values(torch.from_numpy(rows.copy()), copies=item.copies)
            for item, rows in zip(sample.items, pieces, strict=True)
            if item.kind == kind
        ]
        assert torch.equal(torch.cat(values), wanted[name])
    seconds = wanted.get("second_per_grid_ts")
    positions = rope_index(
        family,
        wanted["input_ids"],
        wanted["mm_token_type_ids"],
        wanted["image_grid_thw"],
        wanted["video_grid_thw"],
        None if seconds is None else torch.as_tensor(seconds),
    )
    assert np.array_equal(sample.position_ids[:, : sample.length], positions[:, 0])


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_are_those_of_transformers_and_the_audit_finds_nothing(family: str, rows: Path, tmp_path: Path) -> None:
    dataset = made(rows, tmp_path / "out", config(family))
    assert len(dataset) == len(ROWS)
    for number, row in enumerate(ROWS):
        conversation = Chat(Chat.Options(), MediaLoader(str(rows.parent), False))(Row(number, row))
        assert_as_transformers(dataset[number], dataset, of_the_processor(family, conversation))
    assert verify_dataset(tmp_path / "out").faults == []
    first, image, second = dataset.metadata(0)["images"]
    assert (first["kind"], image["format"], second["kind"]) == ("video", "PNG", "video")
    assert first["seconds"] == [number / 5 for number in first["frames"]]
    assert len(first["patch_seconds"]) == dataset[0].items[0].grid[0]


def stored_as(images: str, videos: str | None) -> PreprocessConfig:
    plain = config(pixels=images)
    return dataclasses.replace(plain, video=dataclasses.replace(plain.video, pixels=videos))


@pytest.mark.parametrize(("images", "videos"), [("raw", "zstd"), ("source", "zstd"), ("jxl", "jxl")])
def test_videos_are_never_raw_by_default(images: str, videos: str, rows: Path, tmp_path: Path) -> None:
    dataset = made(rows, tmp_path / "out", config(pixels=images))
    assert len(dataset) == len(ROWS)
    assert dataset.index.item_codecs.reshape(-1, 3).tolist() == [[videos, images, videos]] * len(ROWS)
    options, found = dataset.manifest.config["options"], dataset.manifest.config["fingerprints"]
    assert (options["pixels"], options["video"]["pixels"]) == (images, videos)
    assert ("video_codec_source" in found) == (images != videos)
    assert verify_dataset(tmp_path / "out").faults == []


def test_recode_stores_images_and_videos_as_preprocessing_does(rows: Path, tmp_path: Path) -> None:
    made(rows, tmp_path / "raw", config())
    for name, images, videos in (("both", None, "raw"), ("mixed", "jxl", "raw")):
        recode_dataset(tmp_path / "raw", tmp_path / f"{name}-copy", images, videos)
        made(rows, tmp_path / name, stored_as(images or "raw", videos))
        assert tree_bytes(tmp_path / f"{name}-copy") == tree_bytes(tmp_path / name)
    recode_dataset(tmp_path / "mixed", tmp_path / "back", "raw")
    assert tree_bytes(tmp_path / "back") == tree_bytes(tmp_path / "raw")
    with pytest.raises(UsageError, match=r"already stores its images with raw and its videos with zstd; give another"):
        recode_dataset(tmp_path / "raw", tmp_path / "none", "raw")
    with pytest.raises(UsageError, match=r"--video-pixels source: it stores files of images"):
        recode_dataset(tmp_path / "raw", tmp_path / "none", "jxl", "source")
    with pytest.raises(ValueError, match="video_pixels is source, which stores files of images"):
        stored_as("raw", "source")


@pytest.mark.parametrize("codec", ["zstd", "jxl"])
def test_codecs_store_videos_and_recode_makes_the_same(codec: str, rows: Path, tmp_path: Path) -> None:
    raw = made(rows, tmp_path / "raw", stored_as("raw", "raw"))
    coded = made(rows, tmp_path / codec, config(pixels=codec))
    assert set(coded.index.item_codecs.tolist()) == {codec}
    for one, other in zip(raw, coded, strict=True):
        assert np.array_equal(one.patches, other.patches)
    recode_dataset(tmp_path / "raw", tmp_path / "copy", codec)
    assert tree_bytes(tmp_path / "copy") == tree_bytes(tmp_path / codec)
    recode_dataset(tmp_path / codec, tmp_path / "back", "raw", "raw")
    assert tree_bytes(tmp_path / "back") == tree_bytes(tmp_path / "raw")
    assert verify_dataset(tmp_path / codec).faults == []


def test_turns_share_their_videos(rows: Path, tmp_path: Path) -> None:
    dataset = made(rows, tmp_path / "out", config(train_turns=TrainTurns.EACH))
    assert len(dataset) == 2 * len(ROWS)
    offsets = dataset.index.item_offsets.reshape(-1, 3)
    # Rows 0 and 1 are in one shard and name the same files.
    assert (offsets[:4] == offsets[0]).all()
    assert dataset.manifest.totals.item_bytes == sum(dataset.index.item_bytes[:3].tolist()) * 2
    assert verify_dataset(tmp_path / "out").faults == []


def test_a_run_that_was_stopped_ends_with_the_same_bytes(rows: Path, tmp_path: Path) -> None:
    made(rows, tmp_path / "whole", config())
    with pytest.raises(StopRun):
        preprocess_dataset(open_source(str(rows)), tmp_path / "out", config(), watcher=stopping(after=1))
    result = preprocess_dataset(open_source(str(rows)), tmp_path / "out", config())
    assert (result.made, result.kept) == (1, 1)
    assert tree_bytes(tmp_path / "out") == tree_bytes(tmp_path / "whole")
    (tmp_path / "out" / "index.parquet").unlink()
    (tmp_path / "out" / "shard-000001.tar").unlink()
    assert preprocess_dataset(open_source(str(rows)), tmp_path / "out", config()).repaired
    assert tree_bytes(tmp_path / "out") == tree_bytes(tmp_path / "whole")


def test_another_decoder_or_other_options_are_found_out(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = made(rows, tmp_path / "out", config())
    options = dataset.manifest.config["options"]["video"]
    assert options == {
        "fps": 2.0,
        "min_frames": 4,
        "max_frames": 768,
        "min_pixels": LEAST_AND_MOST[0],
        "max_pixels": LEAST_AND_MOST[1],
        "pixels": "zstd",
        "cap_pixels_per_frame": False,
        "damaged": "reject",
    }
    other = dataclasses.replace(config(), video=dataclasses.replace(config().video, fps=1.0))
    with pytest.raises(ConfigMismatchError, match=r"config\.options\.video\.fps"):
        preprocess_dataset(open_source(str(rows)), tmp_path / "out", other)
    with monkeypatch.context() as patched:
        patched.setattr("vlmdata.preprocess.shards.fingerprints.video_versions", lambda: {"ffmpeg": "1.0"})
        with pytest.raises(ConfigMismatchError, match=r"config\.fingerprints\.video_decoders\.ffmpeg"):
            preprocess_dataset(open_source(str(rows)), tmp_path / "out", config())
        # Made when frames at uneven intervals could be late.
        earlier = {name: version for name, version in video_versions().items() if name != "frames"}
        patched.setattr("vlmdata.preprocess.shards.fingerprints.video_versions", lambda: earlier)
        made(rows, tmp_path / "earlier", config())
    with pytest.raises(ConfigMismatchError, match=r"config\.fingerprints\.video_decoders\.frames"):
        preprocess_dataset(open_source(str(rows)), tmp_path / "earlier", config())


def test_a_dataset_without_videos_does_not_depend_on_their_decoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = write_jsonl(tmp_path / "plain.jsonl", [{"instruction": "Say yes.", "output": "Yes."}])
    default = dataclasses.replace(config(), video=VideoConfig())
    one = made(plain, tmp_path / "one", default)
    assert "video" not in one.manifest.config["options"]
    monkeypatch.setattr("vlmdata.preprocess.shards.fingerprints.video_versions", lambda: {"ffmpeg": "1.0"})
    made(plain, tmp_path / "other", default)
    manifests = [(tmp_path / name / MANIFEST_NAME).read_bytes() for name in ("one", "other")]
    assert manifests[0] == manifests[1]
    assert preprocess_dataset(open_source(str(plain)), tmp_path / "one", default).kept == 1
    keep = dataclasses.replace(config(), video=VideoConfig(max_frames=9))
    with pytest.raises(ConfigMismatchError, match=r"config\.options\.video"):
        preprocess_dataset(open_source(str(plain)), tmp_path / "one", keep)
