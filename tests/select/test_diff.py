"""Differences of two datasets: by key and by content, whatever the codec."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.format.as_earlier import as_earlier
from tests.preprocess.command_line import Ended
from tests.select.conftest import languages, receipts
from vlmdata.format.dataset import VlmDataset
from vlmdata.preprocess.recode.run import recode_dataset
from vlmdata.select.compare import ChangedSample, DatasetComparison, compare


def differences(first: Path, second: Path) -> DatasetComparison:
    return compare(VlmDataset(first), VlmDataset(second))


def texts_of(folder: Path, *answers: str) -> Path:
    return languages(folder, [{"answer": answer} for answer in answers])


def test_copies_in_another_codec_and_schema_are_equal(made: Path, tmp_path: Path) -> None:
    recode_dataset(made, tmp_path / "zstd", "zstd")
    old = Path(shutil.copytree(made, tmp_path / "old"))
    as_earlier(old, "1.0")
    for other in (made, tmp_path / "zstd", old):
        found = differences(made, other)
        assert found.is_equal
        assert (found.samples, found.equal) == ((8, 8), 8)


def test_changed_added_removed_and_moved_samples(tmp_path: Path) -> None:
    first = texts_of(tmp_path / "a", "One.", "Two.", "Three.", "Four.")
    second = texts_of(tmp_path / "b", "One.", "Two and more.", "Three.")
    found = differences(first, second)
    assert found.changed == (ChangedSample("000000001", ("tokens", "targets", "positions")),)
    assert (found.only_first, found.only_second, found.equal) == (("000000003",), (), 2)
    # One row more at the end, which the other dataset has elsewhere.
    third = texts_of(tmp_path / "c", "One.", "Two.", "Three.", "", "Four.")
    found = differences(first, third)
    assert (found.only_first, found.only_second, found.moved) == (("000000003",), ("000000004",), 1)
    assert not found.is_equal


def test_other_pixels_alone_are_a_change_of_images(tmp_path: Path) -> None:
    first, second = receipts(tmp_path / "a", 0, 3), receipts(tmp_path / "b", 0, 3)
    assert differences(first, second).is_equal
    dataset = VlmDataset(second)
    dataset.index.__dict__["pixel_checksums"] = dataset.index.pixel_checksums ^ 1
    found = compare(VlmDataset(first), dataset)
    assert {part for each in found.changed for part in each.parts} == {"images"}
    assert len(found.changed) == len(dataset)


def test_another_family_is_named(made: Path, tmp_path: Path) -> None:
    found = differences(made, receipts(tmp_path, family="qwen2_5_vl"))
    assert ("family", "qwen3_5", "qwen2_5_vl") in found.settings


def test_command(vlmdata: Callable[..., Ended], tmp_path: Path) -> None:
    first = texts_of(tmp_path / "a", "One.", "Two.", "Three.", "Four.", "Five.")
    second = texts_of(tmp_path / "b", "One.", "Too.")
    ended = vlmdata("diff", first, first)
    assert (ended.code, "5 equal" in ended.stdout) == (0, True)
    ended = vlmdata("diff", first, second, "--shown", 2)
    assert ended.code == 1
    for words in ("1 equal", "1 changed (tokens of 1)", "  000000001: tokens", f"3 only in {first}", "and 1 more"):
        assert words in ended.stdout
    ended = vlmdata("diff", second, first, "--json")
    fields: dict[str, Any] = json.loads(ended.stdout)
    assert (ended.code, fields["equal_datasets"], len(fields["only_second"])) == (1, False, 3)
    ended = vlmdata("diff", first, tmp_path / "nothing")
    assert (ended.code, "no such directory" in ended.stderr) == (2, True)
