"""``--lengths``: what is measured is what a run makes, and what limits would cost of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chat_rows import data_uri, image_item, mixed_rows, turn, write_jsonl
from tests.preprocess.command_line import SMALL_IMAGES, Ended
from vlmdata.errors import SourceError
from vlmdata.preprocess.config import ImageConfig, Overlong, PreprocessConfig, TrainTurns
from vlmdata.preprocess.encode import EncodedSample, Encoder
from vlmdata.preprocess.encode.lengths import LengthMeter, SampleLength
from vlmdata.preprocess.recipes.base import candidates_of
from vlmdata.preprocess.recipes.choice import media_for, recipe_for
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.run.lengths import LengthReport, measure_lengths
from vlmdata.preprocess.run.limits import parse_limits
from vlmdata.preprocess.sources.open import open_source
from vlmdata.preprocess.sources.rows import Source

IMAGES = ImageConfig(min_pixels=1024, max_pixels=65_536)
LARGE = {"width": 512, "height": 512}
#: An image of 64 tokens at 65,536 pixels, of 32 at half of them.
TALKS = [
    {"messages": [turn("user", image_item(**LARGE), "What?"), turn("assistant", "Noise.")]},
    {"messages": [turn("user", image_item(), "What?"), turn("assistant", "Noise, and a lot more to say of it.")]},
    {"messages": [turn("user", "Count."), turn("assistant", " ".join(map(str, range(60))))]},
    {"messages": [turn("user", "Nobody answers.")]},
]
DOCUMENTS = [{"text": "Before.<image>After.", "images": [data_uri(**LARGE)]}, {"text": " ".join(map(str, range(60)))}]


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    from vlmdata.preprocess.chat.tokenizer import load_tokenizer

    return Encoder(PreprocessConfig(recipe="chat", image=IMAGES), load_tokenizer())


def opened(rows: list[dict[str, Any]], folder: Path) -> Source:
    return open_source(str(write_jsonl(folder / "rows.jsonl", rows)))


def report_of(rows: list[dict[str, Any]], folder: Path, encoder: Encoder, limits: str) -> LengthReport:
    source = opened(rows, folder)
    media = media_for(source, encoder.config)
    return measure_lengths(source, recipe_for(source, encoder.config, media), media, encoder, parse_limits(limits))


@pytest.mark.parametrize("turns", list(TrainTurns))
@pytest.mark.parametrize("recipe", ["chat", "text"])
def test_samples_are_as_long_as_a_run_makes_them(
    recipe: str, turns: TrainTurns, encoder: Encoder, tmp_path: Path
) -> None:
    config = PreprocessConfig(recipe=recipe, image=IMAGES, train_turns=turns, max_length=1 << 20)
    run = Encoder(config, encoder.tokenizer)
    source = opened(mixed_rows() + TALKS if recipe == "chat" else DOCUMENTS, tmp_path)
    convert, meter, compared = recipe_for(source, config), LengthMeter(run), 0
    for number in source.numbers:
        try:
            (candidate,) = candidates_of(convert, source.row(number))
            assert not isinstance(candidate.made, RowRejected)
            made = run.encode_all(candidate.made)
        except RowRejected:
            continue
        measured = meter.measure(candidate.made)
        for sample, length in zip(made, measured, strict=True):
            assert isinstance(sample, EncodedSample)
            assert isinstance(length, SampleLength)
            assert length.tokens == sample.length
            assert length.targets.tolist() == sample.loss_mask.nonzero()[0].tolist()
            assert length.images == tuple(item.tokens for item in sample.items)
            compared += 1
    assert compared >= 2


def test_half_the_pixels_are_those_of_a_run_with_half(encoder: Encoder, tmp_path: Path) -> None:
    config = PreprocessConfig(recipe="chat", image=ImageConfig(min_pixels=1024, max_pixels=32_768))
    half = Encoder(config, encoder.tokenizer)
    meter, source = LengthMeter(encoder), opened(TALKS[:3], tmp_path)
    assert meter.half == 32_768
    for number in source.numbers:
        (candidate,) = candidates_of(recipe_for(source, config), source.row(number))
        assert not isinstance(candidate.made, RowRejected)
        (sample,), (length,) = half.encode_all(candidate.made), meter.measure(candidate.made)
        assert isinstance(sample, EncodedSample)
        assert isinstance(length, SampleLength)
        assert length.halved == sample.length


@pytest.mark.parametrize("limit", [40, 60, 100, 150])
def test_a_limit_costs_what_a_run_with_it_loses(limit: int, encoder: Encoder, tmp_path: Path) -> None:
    report = report_of(TALKS, tmp_path, encoder, str(limit))
    (cost,) = report.limits
    kept: dict[Overlong, list[EncodedSample]] = {}
    for overlong in (Overlong.REJECT, Overlong.TRUNCATE):
        config = PreprocessConfig(recipe="chat", image=IMAGES, max_length=limit, overlong=overlong)
        source, made = opened(TALKS[:3], tmp_path), []
        for number in source.numbers:
            (candidate,) = candidates_of(recipe_for(source, config), source.row(number))
            assert not isinstance(candidate.made, RowRejected)
            try:
                made += Encoder(config, encoder.tokenizer).encode_all(candidate.made)
            except RowRejected:
                continue
        kept[overlong] = [each for each in made if isinstance(each, EncodedSample)]
    rejecting, truncating = kept[Overlong.REJECT], kept[Overlong.TRUNCATE]
    assert report.samples - cost.samples == len(rejecting)
    assert report.tokens - cost.tokens == sum(each.length for each in rejecting)
    assert report.targets - cost.targets == sum(int(each.loss_mask.sum()) for each in rejecting)
    if len(truncating) == report.samples:  # none has its limit before its last answer
        assert report.tokens - cost.tokens_beyond == sum(each.length for each in truncating)
        assert report.targets - cost.targets_beyond == sum(int(each.loss_mask.sum()) for each in truncating)


def test_the_report_tells_images_rejects_and_what_fits_at_half(encoder: Encoder, tmp_path: Path) -> None:
    report = report_of(TALKS, tmp_path, encoder, "60,1000")
    assert (report.rows, report.samples, report.rejects) == (4, 3, {"no_targets": 1})
    first, second = report.limits
    assert (first.samples, first.image_tokens, first.fit_at_half) == (2, 64, 1)
    assert (second.samples, second.tokens, second.fit_at_half) == (0, 0, 0)
    (images,) = report.images
    assert (images.most_tokens, images.images, images.tokens, images.in_samples_over) == (128, 2, 68, (1, 0))


def test_without_room_for_half_the_report_says_nothing_of_it(encoder: Encoder, tmp_path: Path) -> None:
    config = PreprocessConfig(recipe="chat", image=ImageConfig(min_pixels=65_536, max_pixels=65_536))
    report = report_of(TALKS, tmp_path, Encoder(config, encoder.tokenizer), "60")
    assert (report.half, report.limits[0].fit_at_half) == (None, None)


def test_no_sample_is_an_error(encoder: Encoder, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"--lengths: no row gives a sample: no_targets \(1\)\. --trace 0"):
        report_of(TALKS[3:], tmp_path, encoder, "60")


@pytest.mark.parametrize("text", ["", "4k", "4096,", "0", "-1", "1.5"])
def test_what_is_no_list_of_limits(text: str) -> None:
    with pytest.raises(ValueError, match=r"give numbers of tokens with commas, such as 4096,8192,16384"):
        parse_limits(text)


class TestTheCommand:
    def test_prints_tables_and_writes_nothing(self, vlmdata: Callable[..., Ended], tmp_path: Path) -> None:
        source = write_jsonl(tmp_path / "rows.jsonl", TALKS)
        ended = vlmdata("preprocess", source, "--lengths", "100,60", *SMALL_IMAGES)
        assert ended.code == 0, ended.stderr
        assert ended.stdout.startswith("3 samples of 4 rows: ")
        assert "not measured, because rejected: 1 no_targets" in ended.stdout
        assert "fit at half: with --max-pixels 32768 instead of 65536" in ended.stdout
        assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]

    def test_prints_json(self, vlmdata: Callable[..., Ended], tmp_path: Path) -> None:
        source = write_jsonl(tmp_path / "rows.jsonl", TALKS)
        ended = vlmdata("preprocess", source, "--lengths", "100,60", *SMALL_IMAGES, "--json")
        report = json.loads(ended.stdout)
        assert [each["limit"] for each in report["limits"]] == [60, 100]
        assert report["images"][0]["in_samples_over"] == [1, 0]

    @pytest.mark.parametrize("other", [("--trace", 0), ("--part", "1/2"), ("--holdout", 0.5)])
    def test_refuses_what_makes_no_sense_with_it(
        self, other: tuple[Any, ...], vlmdata: Callable[..., Ended], tmp_path: Path
    ) -> None:
        source = write_jsonl(tmp_path / "rows.jsonl", TALKS)
        ended = vlmdata("preprocess", source, "--lengths", "60", *SMALL_IMAGES, *other)
        assert (ended.code, f"omit {other[0]}" in ended.said) == (2, True)

    def test_measures_one_split(self, vlmdata: Callable[..., Ended], tmp_path: Path) -> None:
        source = write_jsonl(tmp_path / "rows.jsonl", TALKS)
        ended = vlmdata("preprocess", source, "--lengths", "60", *SMALL_IMAGES, "--split", "train,test")
        assert (ended.code, "--lengths measures one split; give one" in ended.said) == (2, True)
