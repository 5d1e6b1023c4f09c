"""Near duplicates: what counts as near, which sample stays, and that the time does not grow with the square."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.chat_rows import turn, write_jsonl
from tests.conftest import build_dataset
from tests.preprocess.command_line import Ended
from vlmdata import open_dataset
from vlmdata.errors import UsageError
from vlmdata.select import near
from vlmdata.select.choice import Choice, choose
from vlmdata.select.duplicates import Duplicates
from vlmdata.select.marks import near_samples, read_report
from vlmdata.select.near import near_pictures, near_texts, picture_hash, text_signature

WORDS = [f"word{n}" for n in range(200)]


def scene(seed: int, height: int = 240, width: int = 320) -> np.ndarray[Any, np.dtype[np.uint8]]:
    random = np.random.default_rng(seed)
    rough = Image.fromarray(random.integers(0, 256, (9, 12, 3), np.uint8))
    return np.asarray(rough.resize((width, height), Image.Resampling.BICUBIC))


def jpeg(pixels: np.ndarray[Any, np.dtype[np.uint8]], quality: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "jpeg", quality=quality)
    return file.getvalue()


def changed(pixels: np.ndarray[Any, np.dtype[np.uint8]], how: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    picture = Image.fromarray(pixels)
    if how == "smaller":
        return np.asarray(picture.resize((200, 150), Image.Resampling.LANCZOS))
    if how == "jpeg":
        return np.asarray(Image.open(io.BytesIO(jpeg(pixels, 20))))
    if how == "brighter":
        return np.asarray(picture.point(lambda value: min(255, value + 12)))
    return np.asarray(picture.convert("L").convert("RGB"))


def bits(one: int, other: int) -> int:
    return (one ^ other).bit_count()


class TestPictures:
    @pytest.mark.parametrize("how", ["smaller", "jpeg", "brighter", "grey"])
    def test_a_copy_of_a_picture_is_near(self, how: str) -> None:
        for seed in range(20):
            assert bits(picture_hash(scene(seed)), picture_hash(changed(scene(seed), how))) <= near.NEAR_BITS

    def test_other_pictures_are_not(self) -> None:
        hashes = [picture_hash(scene(seed)) for seed in range(60)]
        assert min(bits(a, b) for i, a in enumerate(hashes) for b in hashes[:i]) > near.NEAR_BITS

    def test_pictures_of_one_colour_are_near_those_of_this_colour_only(self) -> None:
        def of(*colour: int) -> int:
            return picture_hash(np.broadcast_to(np.array(colour, np.uint8), (40, 50, 3)))

        assert of(0, 0, 0) == of(0, 0, 0)
        assert bits(of(0, 0, 0), of(255, 255, 255)) > near.NEAR_BITS

    def test_every_pair_within_the_limit_is_a_candidate(self) -> None:
        """Equals a comparison of all pairs."""
        random = np.random.default_rng(3)
        hashes = [int(each) for each in random.integers(0, 1 << 63, 150, np.uint64)]
        for each in hashes[:100]:
            flips = random.choice(64, random.integers(0, 9), replace=False).tolist()
            hashes.append(each ^ sum(1 << flip for flip in flips))
        found = {(each.sample, each.kept) for each in near_pictures(range(len(hashes)), [[h] for h in hashes])}
        expected, firsts = set(), list[int]()
        for i, own in enumerate(hashes):
            like = next((first for first in firsts if bits(own, hashes[first]) <= near.NEAR_BITS), None)
            if like is None:
                firsts.append(i)
            else:
                expected.add((i, like))
        assert found == expected
        assert 20 < len(found) < 100

    def test_all_pictures_of_samples_must_be_near_and_as_many(self) -> None:
        marks = [[1 << 40, 7], [1 << 40, 7 << 30], [1 << 40], [3 << 40, 7]]
        assert [(each.sample, each.kept) for each in near_pictures(range(4), marks)] == [(1, 0), (3, 0)]
        marks[1] = [1 << 40, (1 << 64) - 1]
        assert [each.sample for each in near_pictures(range(4), marks)] == [3]


class TestTexts:
    def test_a_changed_word_is_near_and_half_of_the_words_are_not(self) -> None:
        text = " ".join(WORDS)
        edited = text.replace("word100 ", "other ").upper()
        half = " ".join([*WORDS[:100], *(f"x{n}" for n in range(100))])
        found = near_texts([4, 5, 9], [text_signature(each) for each in (text, edited, half)])
        assert [(each.sample, each.kept) for each in found] == [(5, 4)]
        assert 0.8 < found[0].likeness < 1

    def test_short_texts_are_near_if_their_words_are_equal(self) -> None:
        marks = [text_signature(each) for each in ("Yes", "yes ", "No", "", " ")]
        assert [(each.sample, each.kept) for each in near_texts(range(5), marks)] == [(1, 0), (4, 3)]

    def test_the_likeness_estimates_the_share_of_common_runs(self) -> None:
        for common in (50, 100, 150):
            one, other = (" ".join([*WORDS[:common], *(f"{x}{n}" for n in range(200 - common))]) for x in "ab")
            runs = [
                {tuple(words[at : at + 3]) for at in range(len(words) - 2)} for words in (one.split(), other.split())
            ]
            share = len(runs[0] & runs[1]) / len(runs[0] | runs[1])
            assert abs(float((text_signature(one) == text_signature(other)).mean()) - share) < 0.15


def test_the_number_of_comparisons_grows_with_the_number_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """8,000 pictures, most of them different: a comparison of all pairs would be 32 million."""
    random, compared = np.random.default_rng(0), [0]

    class Counting(int):
        def __xor__(self, other: int) -> int:
            compared[0] += 1
            return int(self) ^ int(other)

    hashes = [[Counting(each)] for each in random.integers(0, 1 << 63, 8000, np.uint64).tolist()]
    assert near_pictures(range(8000), hashes) == []
    assert compared[0] < 8000 * 15


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A picture, it again as a small file, another, one without a picture and two that tell nearly the same."""
    folder = tmp_path_factory.mktemp("near")
    (folder / "a.jpg").write_bytes(jpeg(scene(1), 95))
    (folder / "b.jpg").write_bytes(jpeg(scene(1), 30))
    (folder / "c.jpg").write_bytes(jpeg(scene(2), 95))
    long = " ".join(WORDS[:60])

    def row(image: str | None, answer: str) -> dict[str, Any]:
        parts = [] if image is None else [{"type": "image", "image": image}]
        return {"messages": [turn("user", *parts, "What is it?"), turn("assistant", answer)]}

    rows = [row("a.jpg", "One thing."), row("c.jpg", "Another."), row("b.jpg", long), row(None, long + " Yes.")]
    source = write_jsonl(folder / "rows.jsonl", rows)
    return build_dataset(source, folder / "dataset", recipe="chat", rows_per_shard=2, pixels="zstd")


@pytest.mark.parametrize(("kind", "pairs"), [(Duplicates.NEAR_IMAGES, [(2, 0)]), (Duplicates.NEAR_TEXTS, [(3, 2)])])
def test_the_first_of_a_group_stays(dataset: Path, kind: Duplicates, pairs: list[tuple[int, int]]) -> None:
    opened = open_dataset(dataset)
    chosen = choose(opened, Choice(drop_duplicates=kind))
    assert [(each.sample, each.kept) for each in chosen.near] == pairs
    assert np.flatnonzero(~chosen.mask).tolist() == [pair[0] for pair in pairs]
    assert near_samples(opened, kind, [2, 3]) == ([] if kind is Duplicates.NEAR_IMAGES else list(chosen.near))


def test_the_commands_show_them_side_by_side(dataset: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    command: Callable[..., Ended] = request.getfixturevalue("vlmdata")
    report, page = tmp_path / "near.jsonl", tmp_path / "near.html"
    options = ("--drop-duplicates", "near-images", "--duplicates-report", report, "--dry-run", "--json")
    ended = command("select", dataset, *options)
    assert json.loads(ended.stdout)["near_duplicates"] == 1
    (line,) = read_report(report)
    assert (line["key"], line["kept"], line["kind"]) == ("000000002", "000000000", "near-images")
    shown = command("inspect", dataset, "--duplicates", report)
    assert shown.said.index("000000000") < shown.said.index("000000002")
    assert "One thing." in shown.said
    command("inspect", dataset, "--duplicates", report, "--html", page)
    text = page.read_text()
    assert "stays for 1" in text
    assert "near-images of 000000000" in text
    refused = command("select", dataset, "--drop-duplicates", "texts", "--duplicates-report", report, "--dry-run")
    assert "needs --drop-duplicates near-texts or near-images" in refused.said
    with pytest.raises(UsageError, match="no report of `vlmdata select"):
        read_report(page)
