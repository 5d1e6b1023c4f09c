"""A retokenized dataset is the one that preprocessing with the new settings makes, without decoding an image."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.changing_source import Team, row
from tests.chat_rows import mixed_rows, turn, write_jsonl
from tests.conftest import build_dataset, encoded_image, tree_bytes
from tests.documents import DOCUMENT_ROWS
from tests.list_recipe import LIST_ROWS
from tests.list_recipe import NAME as LISTS
from tests.media.video.clips import clip
from tests.preprocess.command_line import Ended
from tests.weighted import RECIPE, with_weights
from vlmdata import open_dataset
from vlmdata.errors import DatasetFormatError, UsageError
from vlmdata.format.schema import IMAGE_FILES_NAME, MANIFEST_NAME
from vlmdata.media.decode import decode_image
from vlmdata.preprocess.assets import EMBEDDED_TOKENIZER
from vlmdata.preprocess.config import ImageConfig, Overlong, PreprocessConfig, TrainTurns, VideoConfig
from vlmdata.preprocess.recode.old_dataset import OldDataset
from vlmdata.preprocess.retokenize.run import old_config, retokenize_dataset
from vlmdata.preprocess.run.dataset import Watcher, preprocess_dataset
from vlmdata.preprocess.sources.holdout import hold_out
from vlmdata.preprocess.sources.open import open_source
from vlmdata.storage import open_store
from vlmdata.storage.join import join_datasets
from vlmdata.verify.dataset import verify_dataset

#: Settings of text that a dataset may be made again with.
SETTINGS: dict[str, dict[str, Any]] = {
    "last": {"train_turns": TrainTurns.LAST},
    "each": {"train_turns": TrainTurns.EACH},
    "short": {"max_length": 40, "overlong": Overlong.TRUNCATE},
    "prompted": {"system_prompt": "You see well.", "pad_multiple": 32},
}
SMALL = ImageConfig(min_pixels=1024, max_pixels=65536)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats with no, one and two images, an image twice, weights, rejected rows, tools, and an image named by path."""
    folder = tmp_path_factory.mktemp("chats")
    named = {"messages": [turn("user", {"type": "image", "image": "it.png"}, "?"), turn("assistant", "Noise.")]}
    twice = {"messages": [turn("user", *[{"type": "image", "image": "it.png"}] * 2, "?"), turn("assistant", "Same.")]}
    (folder / "it.png").write_bytes(encoded_image(seed=9))
    return write_jsonl(folder / "rows.jsonl", with_weights([*mixed_rows(), named, twice]))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The embedded tokenizer with another chat template."""
    folder = tmp_path_factory.mktemp("tokenizer") / "other"
    shutil.copytree(EMBEDDED_TOKENIZER, folder)
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text().replace("<|im_start|>user", "<|im_start|>user").replace("\r", "") + "{# other #}")
    return str(folder)


def made(source: Path, name: str, **options: Any) -> Path:
    return build_dataset(source, source.with_name(name), **{"recipe": RECIPE, "rows_per_shard": 3, **options})


def again(old: Path, out: Path, source: Path | None = None, keep_rejected: bool = True, **options: Any) -> Path:
    """Retokenizes a dataset; decoding an image or a video is an error."""
    dataset = OldDataset.open(old)
    config = replace(old_config(dataset), **options)
    rows = None if source is None else open_source(str(source), recipe=config.recipe)
    retokenize_dataset(dataset, open_store(out), config, source=rows, keep_rejected=keep_rejected)
    return out


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing decodes pixels, but for the image with which a tokenizer is tried."""

    def refuse(*arguments: Any, **more: Any) -> Any:
        if "probe" in str(arguments[-1]):
            return decode_image(*arguments, **more)
        raise AssertionError("pixels were decoded")

    for place in ("image.decode_image", "video.decode_image", "video.sample_video", "video.read_contents"):
        monkeypatch.setattr(f"vlmdata.preprocess.encode.{place}", refuse)
    monkeypatch.setattr("vlmdata.preprocess.recode.shard.decode_item", refuse)


def without_places(files: dict[str, bytes]) -> dict[str, Any]:
    """The files of a dataset; the lines of the ledger without the places of rows."""
    lines = [json.loads(line) for line in files["rejected.jsonl"].splitlines()]
    places = ("file", "file_row", "id")
    manifest = {name: value for name, value in json.loads(files["manifest.json"]).items() if name != "ledger_sha256"}
    ledger = [{name: value for name, value in line.items() if name not in places} for line in lines]
    return {**files, "rejected.jsonl": ledger, "manifest.json": manifest}


@pytest.mark.parametrize("kept", [False, True], ids=["source", "shards"])
@pytest.mark.parametrize(
    ("setting", "pixels"),
    [("last", "raw"), ("each", "raw"), ("each", "zstd"), ("short", "source"), ("prompted", "raw")],
)
def test_it_is_what_preprocessing_makes(
    chats: Path, tmp_path: Path, setting: str, pixels: str, kept: bool, request: pytest.FixtureRequest
) -> None:
    options = {"pixels": pixels, "keep_conversations": kept}
    old = chats.with_name(f"{pixels}-{kept}")
    if not old.exists():
        made(chats, old.name, **options)
    fresh = build_dataset(chats, tmp_path / "fresh", recipe=RECIPE, rows_per_shard=3, **options, **SETTINGS[setting])
    request.getfixturevalue("blind")
    out = again(old, tmp_path / "out", None if kept else chats, **SETTINGS[setting])
    found, expected = tree_bytes(out), tree_bytes(fresh)
    if kept:
        # Where rows are that only the new settings reject is known from the source alone.
        found, expected = without_places(found), without_places(expected)
    assert found == expected
    assert verify_dataset(out).faults == []
    if kept:
        times = {(folder / IMAGE_FILES_NAME).stat().st_mtime_ns for folder in (old, out)}
        assert len(times) == 1  # since when changes of image files count


@pytest.mark.parametrize("pixels", ["raw", "zstd"])
def test_a_sample_per_turn_becomes_one_of_all_turns_with_another_template(
    chats: Path, tmp_path: Path, template: str, pixels: str, request: pytest.FixtureRequest
) -> None:
    """Its images lie in the samples of several turns, and those of others share them."""
    options: dict[str, Any] = {"recipe": RECIPE, "rows_per_shard": 3, "pixels": pixels, "keep_conversations": True}
    old = build_dataset(chats, tmp_path / "old", train_turns=TrainTurns.EACH, **options)
    fresh = build_dataset(chats, tmp_path / "fresh", tokenizer=template, **options)
    request.getfixturevalue("blind")
    new = {"tokenizer": template, "train_turns": TrainTurns.ALL}
    assert tree_bytes(again(old, tmp_path / "out", **new)) == tree_bytes(fresh)
    assert tree_bytes(again(old, tmp_path / "sourced", chats, **new)) == tree_bytes(fresh)


@pytest.mark.parametrize("kept", [False, True], ids=["source", "shards"])
def test_documents_are_split_anew(tmp_path: Path, kept: bool, request: pytest.FixtureRequest) -> None:
    """Images of all pieces are found again, and pieces have other bounds."""
    source = write_jsonl(tmp_path / "rows.jsonl", DOCUMENT_ROWS)
    options: dict[str, Any] = {"recipe": "text", "overlong": Overlong.SPLIT, "keep_conversations": kept, "image": SMALL}
    old = build_dataset(source, tmp_path / "old", max_length=60, **options)
    fresh = build_dataset(source, tmp_path / "fresh", max_length=90, **options)
    request.getfixturevalue("blind")
    out = again(old, tmp_path / "out", None if kept else source, max_length=90)
    assert tree_bytes(out) == tree_bytes(fresh)


@pytest.mark.parametrize("kept", [False, True], ids=["source", "shards"])
def test_lists_keep_their_numbers_and_rejections(tmp_path: Path, kept: bool) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", LIST_ROWS)
    options: dict[str, Any] = {"recipe": LISTS, "keep_conversations": kept}
    old = build_dataset(source, tmp_path / "old", **options)
    fresh = build_dataset(source, tmp_path / "fresh", train_turns=TrainTurns.EACH, **options)
    out = again(old, tmp_path / "out", None if kept else source, train_turns=TrainTurns.EACH)
    assert tree_bytes(out) == tree_bytes(fresh)


@pytest.mark.parametrize("kept", [False, True], ids=["source", "shards"])
def test_videos_keep_their_frames_and_times(tmp_path: Path, kept: bool, request: pytest.FixtureRequest) -> None:
    (tmp_path / "it.mkv").write_bytes(clip("ffv1", 8, 2, (48, 64), pixels="yuv444p"))
    (tmp_path / "it.png").write_bytes(encoded_image(seed=1))
    talk = [{"role": "user", "content": "<video> and <image>?"}, {"role": "assistant", "content": "Light."}]
    source = write_jsonl(tmp_path / "rows.jsonl", [{"messages": talk, "videos": ["it.mkv"], "images": ["it.png"]}])
    options: dict[str, Any] = {"recipe": "chat", "keep_conversations": kept}
    options["video"] = VideoConfig(min_pixels=4096, max_pixels=65536)
    old = build_dataset(source, tmp_path / "old", **options)
    fresh = build_dataset(source, tmp_path / "fresh", system_prompt="Look.", **options)
    request.getfixturevalue("blind")
    out = again(old, tmp_path / "out", None if kept else source, system_prompt="Look.")
    assert tree_bytes(out) == tree_bytes(fresh)


@pytest.mark.parametrize("kept", [False, True], ids=["source", "shards"])
def test_one_side_of_a_holdout_keeps_its_rows(chats: Path, tmp_path: Path, kept: bool) -> None:
    config = PreprocessConfig(recipe=RECIPE, image=SMALL, rows_per_shard=3, keep_conversations=kept)
    source = hold_out(open_source(str(chats)), 0.5)["train"]
    preprocess_dataset(source, tmp_path / "old", config)
    preprocess_dataset(source, tmp_path / "fresh", replace(config, pad_multiple=64))
    out = again(tmp_path / "old", tmp_path / "out", None if kept else chats, pad_multiple=64)
    assert tree_bytes(out) == tree_bytes(tmp_path / "fresh")


def test_rows_that_were_rejected_come_from_the_source(chats: Path, tmp_path: Path) -> None:
    """Their pixels are not in the shards, so they are decoded."""
    old = made(chats, "overlong", max_length=30)
    fresh = build_dataset(chats, tmp_path / "fresh", recipe=RECIPE, rows_per_shard=3)
    assert len(open_dataset(fresh)) > len(open_dataset(old))
    assert tree_bytes(again(old, tmp_path / "out", chats, max_length=8192)) == tree_bytes(fresh)


def test_an_image_that_changed_since_is_decoded(tmp_path: Path) -> None:
    named = {"messages": [turn("user", {"type": "image", "image": "it.png"}, "?"), turn("assistant", "Noise.")]}
    source = write_jsonl(tmp_path / "rows.jsonl", [named, named])
    (tmp_path / "it.png").write_bytes(encoded_image(seed=1))
    old = build_dataset(source, tmp_path / "old", recipe="chat")
    (tmp_path / "it.png").write_bytes(encoded_image(seed=2))
    fresh = build_dataset(source, tmp_path / "fresh", recipe="chat", pad_multiple=32)
    assert tree_bytes(again(old, tmp_path / "out", source, pad_multiple=32)) == tree_bytes(fresh)


def test_an_interrupted_run_continues(chats: Path, tmp_path: Path) -> None:
    old = made(chats, "continued", keep_conversations=True)
    first, begun = tmp_path / "out", RunBegun()
    with pytest.raises(RunBegun):
        retokenize(old, first, begun)
    assert not (first / MANIFEST_NAME).exists()
    again(old, first, pad_multiple=64)
    assert tree_bytes(first) == tree_bytes(again(old, tmp_path / "whole", pad_multiple=64))


class RunBegun(Exception):
    """Ends a run after its first shard."""


def retokenize(old: Path, out: Path, stop: Exception) -> None:
    def end(record: object) -> None:
        raise stop

    dataset = OldDataset.open(old)
    config = replace(old_config(dataset), pad_multiple=64)
    retokenize_dataset(dataset, open_store(out), config, keep_rejected=True, watcher=Watcher(shard_done=end))


class TestWhatIsRefused:
    """Each error names what helps."""

    @pytest.fixture(scope="class")
    def old(self, chats: Path) -> Path:
        return made(chats, "plain")

    def test_conversations_that_are_neither_stored_nor_given(self, old: Path, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"its conversations are not stored\. Give --source"):
            again(old, tmp_path / "out")

    def test_rejected_rows_without_their_source(self, chats: Path, tmp_path: Path) -> None:
        old = made(chats, "kept", keep_conversations=True)
        with pytest.raises(UsageError, match=r"3 no_assistant_turn.*--keep-rejected"):
            again(old, tmp_path / "out", keep_rejected=False)

    def test_rows_that_were_rejected_before_do_not_fail_the_command(
        self, chats: Path, tmp_path: Path, vlmdata: Callable[..., Ended]
    ) -> None:
        old, command = made(chats, "left out", keep_conversations=True), ("retokenize", "--keep-rejected", "--json")
        same = vlmdata(*command, old, "--out", tmp_path / "same")
        assert (same.code, json.loads(same.stdout)["reject_rate"]) == (0, 0), same.said
        shorter = vlmdata(*command, old, "--out", tmp_path / "shorter", "--max-length", 40)
        assert shorter.code == 1
        assert json.loads(shorter.stdout)["reject_rate"] > 0

    def test_another_source(self, old: Path, tmp_path: Path) -> None:
        other = write_jsonl(tmp_path / "rows.jsonl", mixed_rows())
        with pytest.raises(UsageError, match=r"--source: is not what .* was made of:\n  files"):
            again(old, tmp_path / "out", other)

    def test_a_tokenizer_of_another_family(self, old: Path, chats: Path, tmp_path: Path) -> None:
        shutil.copytree(EMBEDDED_TOKENIZER, tmp_path / "other")
        (tmp_path / "other" / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl"}))
        with pytest.raises(UsageError, match=r"is of the family qwen2_5_vl, but .* has pixels for qwen3_5"):
            again(old, tmp_path / "out", chats, tokenizer=str(tmp_path / "other"))

    def test_joined_and_selected_datasets(self, old: Path, tmp_path: Path) -> None:
        join_datasets([open_store(old)] * 2, open_store(tmp_path / "joined"), allow_duplicates=True)
        with pytest.raises(UsageError, match=r"joined of several datasets\. Retokenize each, then join"):
            again(tmp_path / "joined", tmp_path / "out")

    def test_the_dataset_itself(self, old: Path, chats: Path) -> None:
        with pytest.raises(UsageError, match="is the dataset to read; give another folder"):
            again(old, old, chats)

    def test_pixels_of_other_versions(self, old: Path, chats: Path, tmp_path: Path) -> None:
        copy = Path(shutil.copytree(old, tmp_path / "copy"))
        manifest = json.loads((copy / MANIFEST_NAME).read_bytes())
        manifest["config"]["fingerprints"]["libraries"]["pillow"] = "1.0"
        (copy / MANIFEST_NAME).write_text(json.dumps(manifest))
        with pytest.raises(UsageError, match=r"libraries\.pillow: \"1\.0\" there.*Install these versions"):
            again(copy, tmp_path / "out", chats)

    def test_a_damaged_shard(self, old: Path, chats: Path, tmp_path: Path) -> None:
        copy = Path(shutil.copytree(old, tmp_path / "copy"))
        shard = copy / "shard-000000.tar"
        content = bytearray(shard.read_bytes())
        content[3000] ^= 1
        shard.write_bytes(content)
        with pytest.raises(DatasetFormatError, match=r"shard-000000\.tar.*changed after preprocessing"):
            again(copy, tmp_path / "out", chats)


def test_the_command(chats: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    command: Callable[..., Ended] = request.getfixturevalue("vlmdata")
    images = ("--min-pixels", "1024", "--max-pixels", "65536", "--rows-per-shard", "3")
    common = ("--recipe", RECIPE, "--tokenizer", "embedded", *images, "--max-reject-rate", "1", "-j", "1")
    command("preprocess", chats, *common, "--out", tmp_path / "old")
    command("preprocess", chats, *common, "--train-turns", "last", "--out", tmp_path / "fresh")
    ended = command(
        *("retokenize", tmp_path / "old", "--source", chats, "--train-turns", "last", "--out", tmp_path / "out"),
        *("-j", "1", "--max-reject-rate", "1", "--json"),
    )
    assert (ended.code, json.loads(ended.stdout)["train_turns"]) == (0, "last")
    assert tree_bytes(tmp_path / "out") == tree_bytes(tmp_path / "fresh")
    refused = command("retokenize", tmp_path / "old", "--out", tmp_path / "no", "-O", "unmarked=first")
    assert refused.code == 2
    assert "--recipe-option needs --source" in refused.said


def test_a_version_keeps_its_rows(tmp_path: Path) -> None:
    """Its shards are those of earlier versions and its own."""
    team = Team(tmp_path)
    team.run(config={"keep_conversations": True})
    team.paint(1, seed=77)
    team.run([*team.rows, row("Row 8", "0.png")], config={"keep_conversations": True})
    version = team.version()
    out = again(Path(version.name), tmp_path / "again", pad_multiple=64)
    made = open_dataset(out)
    assert made.index.keys.to_pylist() == version.index.keys.to_pylist()
    for old, new in zip(version, made, strict=True):
        assert (old.length, old.patches.tobytes()) == (new.length, new.patches.tobytes())
        assert len(new.input_ids) % 64 == 0
    assert verify_dataset(out).faults == []


@pytest.mark.parametrize("overlong", [Overlong.DROP_TURNS, Overlong.SHRINK_IMAGES])
def test_what_was_shortened_is_read_again(tmp_path: Path, overlong: Overlong) -> None:
    """The shards have other images than the row, so a larger limit takes its pixels from the source."""
    picture = [{"type": "image", "image": tmp_path.joinpath(f"{n}.png").as_posix()} for n in range(2)]
    for number in range(2):
        (tmp_path / f"{number}.png").write_bytes(encoded_image(seed=number, width=200, height=200))
    talk = [
        turn("user", picture[0], "?"),
        turn("assistant", "A."),
        turn("user", picture[1], "?"),
        turn("assistant", "B."),
    ]
    source = write_jsonl(tmp_path / "rows.jsonl", [{"messages": talk}])
    media = {"recipe": "chat", "image": SMALL, "keep_conversations": True}
    old = build_dataset(source, tmp_path / "old", max_length=70, overlong=overlong, **media)
    assert open_dataset(old).metadata(0)["shortened"]
    fresh = build_dataset(source, tmp_path / "fresh", max_length=200, overlong=overlong, **media)
    assert "shortened" not in open_dataset(fresh).metadata(0)
    assert tree_bytes(again(old, tmp_path / "out", source, max_length=200)) == tree_bytes(fresh)
    short = again(fresh, tmp_path / "short", source, max_length=70)
    assert tree_bytes(short) == tree_bytes(old)
    with pytest.raises(UsageError, match=f"--overlong {overlong}: it needs the whole conversations"):
        again(old, tmp_path / "none", max_length=200)
