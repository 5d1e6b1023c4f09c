"""Every number of the dataset card, worked out again from the raw files."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.inspect.raw import RawSample, read_index, read_rejects, read_samples
from vlmdata.inspect import describe_dataset
from vlmdata.inspect.dataset import DatasetCard
from vlmdata.inspect.histogram import Histogram, histogram
from vlmdata.storage.open import open_dataset


@pytest.fixture(scope="module", params=["demo", "mixed"])
def folder(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture(scope="module")
def raw(folder: Path) -> list[RawSample]:
    return read_samples(folder)


@pytest.fixture(scope="module")
def card(folder: Path) -> DatasetCard:
    return describe_dataset(open_dataset(folder))


def test_identity_is_the_manifests(folder: Path, card: DatasetCard) -> None:
    text = (folder / "manifest.json").read_bytes()
    manifest = json.loads(text)
    assert card.fingerprint == hashlib.sha256(text).hexdigest()
    assert card.config_hash == manifest["config_hash"]
    assert card.tokenizer.fingerprint == manifest["tokenizer"]["fingerprint"]
    assert card.options == manifest["config"]["options"]
    assert card.shards == len(list(folder.glob("shard-*.tar")))


def test_totals_are_those_of_the_shards(folder: Path, raw: list[RawSample], card: DatasetCard) -> None:
    rejects = read_rejects(folder)
    totals = card.totals
    assert totals.samples == len(raw)
    assert totals.rejected == len(rejects)
    assert totals.rows == len(raw) + len(rejects)
    assert totals.tokens == sum(sample.length for sample in raw)
    assert totals.padding == sum(len(sample.arrays["input_ids"]) - sample.length for sample in raw)
    assert totals.targets == sum(int(sample.mask.sum()) for sample in raw)
    assert totals.items == sum(len(sample.grids) for sample in raw)
    assert totals.patches == sum(len(sample.arrays["patches"]) for sample in raw)
    assert totals.bytes == sum(path.stat().st_size for path in folder.glob("shard-*.tar"))


def test_histograms_count_what_the_shards_hold(raw: list[RawSample], card: DatasetCard) -> None:
    grids = [grid for sample in raw for grid in sample.grids.tolist()]
    values = {
        "length": [sample.length for sample in raw],
        "target_share": [sample.mask.sum() / sample.length for sample in raw],
        "images": [len(sample.grids) for sample in raw],
        "patches": [len(sample.arrays["patches"]) for sample in raw],
        "aspect_ratio": [w / h for _, h, w in grids],
    }
    assert [each.name for each in card.histograms] == list(values)
    for each in card.histograms:
        expected = values[each.name]
        assert each.count == len(expected)
        assert each.mean == pytest.approx(np.mean(expected))
        bins = [sum(low <= v < high for v in expected) for low, high in zip(each.edges, each.edges[1:], strict=False)]
        assert list(each.counts) == bins
        assert dict(each.percentiles)[0] == pytest.approx(min(expected))
        assert dict(each.percentiles)[100] == pytest.approx(max(expected))
        assert dict(each.percentiles)[50] == pytest.approx(sorted(expected)[-(-len(expected) // 2) - 1])


def test_extremes_are_the_ends_of_the_distributions(raw: list[RawSample], card: DatasetCard) -> None:
    measures = {
        "longest": lambda s: -s.length,
        "most_patches": lambda s: -len(s.arrays["patches"]),
        "smallest_target_share": lambda s: s.mask.sum() / s.length,
        "shortest": lambda s: s.length,
    }
    for extremes in card.extremes:
        measure = measures[extremes.name]
        expected = sorted(raw, key=lambda s: (measure(s), s.key))[:5]
        assert [sample.key for sample in extremes.samples] == [sample.key for sample in expected]
        assert [abs(sample.value) for sample in extremes.samples] == pytest.approx([abs(measure(s)) for s in expected])
        assert [sample.source_row for sample in extremes.samples] == [s.metadata["source_row"] for s in expected]


def test_rejects_are_the_ledgers(folder: Path, card: DatasetCard) -> None:
    rejects = read_rejects(folder)
    counts = Counter(line["reason"] for line in rejects)
    assert {group.reason: group.count for group in card.rejects} == counts
    for group in card.rejects:
        expected = [(line["row"], line["message"]) for line in rejects if line["reason"] == group.reason]
        assert list(group.examples) == expected[:5]


def test_only_notes_are_found_in_sound_data(raw: list[RawSample], card: DatasetCard) -> None:
    image = [sum(t * h * w // 4 for t, h, w in sample.grids.tolist()) for sample in raw]
    larger = [s.key for s, tokens in zip(raw, image, strict=True) if tokens > s.length - tokens]
    assert {group.kind: group.count for group in card.findings} == (
        {"image_larger_than_text": len(larger)} if larger else {}
    )
    assert card.checked == len(raw)


def test_a_part_is_checked_when_asked_and_the_extremes_are_in_it(folder: Path) -> None:
    dataset = open_dataset(folder)
    assert describe_dataset(dataset, check=0).checked == 0
    assert describe_dataset(dataset, check=3).checked == 3


def test_the_index_alone_is_read_when_nothing_is_checked(folder: Path, copy_of: object) -> None:
    # Shards that cannot be read do not matter to a card that looks into none.
    copy = copy_of(folder)  # type: ignore[operator]
    for path in copy.glob("shard-*.tar"):
        path.unlink()
    assert describe_dataset(open_dataset(copy), check=0).totals.samples == len(read_index(folder))


@given(values=st.lists(st.integers(0, 10**7), min_size=1, max_size=60))
def test_integer_bins_are_few_even_and_hold_everything(values: list[int]) -> None:
    found = histogram("x", "x", "integer", np.array(values))
    assert found is not None
    _check(found, values)
    if found.scale == "log":
        assert _crowded_by_one_far_value(values)
        return
    assert len({b - a for a, b in zip(found.edges, found.edges[1:], strict=False)}) == 1


def _crowded_by_one_far_value(values: list[int]) -> bool:
    return max(values) >= 10 * max(float(np.median(values)), 1.0)


@given(
    st.lists(st.integers(0, 60), min_size=9, max_size=60),
    st.integers(10_000, 10**7),
    st.sampled_from(["integer", "ratio"]),
)
def test_one_outlier_does_not_eat_the_axis(values: list[int], outlier: int, kind: str) -> None:
    found = histogram("x", "x", kind, np.array([*values, outlier]))
    assert found is not None
    assert found.scale == "log"
    _check(found, [*values, outlier])
    if kind == "integer":
        assert all(isinstance(edge, int) for edge in found.edges)
    # Even the coarsest bins tell 0, ones, tens, hundreds, … apart.
    sizes = {len(str(value)) if value else 0 for value in [*values, outlier]}
    assert sum(count > 0 for count in found.counts) >= len(sizes)


def test_values_of_one_size_keep_bins_of_one_width() -> None:
    found = histogram("x", "x", "integer", np.array([900, 1_000, 1_100, 1_200, 4_000]))
    assert found is not None
    assert found.scale == "linear"


@given(values=st.lists(st.floats(0, 1), min_size=1, max_size=60))
def test_share_bins_are_few_and_hold_everything(values: list[float]) -> None:
    found = histogram("x", "x", "share", np.array(values))
    assert found is not None
    _check(found, values)


def _check(found: Histogram, values: list[int] | list[float]) -> None:
    assert sum(found.counts) == found.count == len(values)
    assert 1 <= len(found.counts) <= 12
    assert found.edges[0] <= min(values)
    assert max(values) <= found.edges[-1]


def test_values_that_differ_by_nothing_to_speak_of_share_a_bin() -> None:
    found = histogram("x", "x", "share", np.array([0.0, 2e-105]))
    assert found is not None
    _check(found, [0.0, 2e-105])
