"""Rows that give several samples: keys, ledger, counts and verification."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import tree_bytes
from tests.list_recipe import LIST_KEYS, LIST_REJECTS, NAME, build_lists
from vlmdata.format.ledger import read_ledger
from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import parse_key, sample_key
from vlmdata.preprocess.conversation import Conversation
from vlmdata.preprocess.recipes.base import candidates_of, load_recipe
from vlmdata.preprocess.row import Row
from vlmdata.storage.open import open_dataset
from vlmdata.verify.dataset import verify_dataset


@pytest.fixture(scope="module")
def lists(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_lists(tmp_path_factory.mktemp("lists"), rows_per_shard=3)


def test_each_element_of_a_list_is_a_sample_or_rejected_alone(lists: Path) -> None:
    dataset = open_dataset(lists)
    assert dataset.index.keys.to_pylist() == LIST_KEYS
    rejections = list(read_ledger(lists / "rejected.jsonl"))
    assert [(r.row, r.sample, r.reason.value) for r in rejections] == LIST_REJECTS
    lines = [json.loads(line) for line in (lists / "rejected.jsonl").read_text().splitlines()]
    assert ["sample" in line for line in lines] == [sample is not None for _, sample, _ in LIST_REJECTS]


def test_metadata_and_index_name_row_and_place_in_its_list(lists: Path) -> None:
    dataset = open_dataset(lists)
    for i, key in enumerate(LIST_KEYS):
        row, number = parse_key(key) or (-1, -1)
        metadata = dataset.metadata(i)
        assert dataset.index.source_row[i] == metadata["source_row"] == row
        assert metadata.get("sample", -1) == number
    assert (np.diff(dataset.index.source_row) >= 0).all()


def test_counts_add_up_by_shard_and_in_all(lists: Path) -> None:
    manifest = Manifest.read(lists)
    assert [(s.samples, s.rejected, s.candidates) for s in manifest.shards] == [(3, 3, 6), (3, 1, 4), (1, 2, 3)]
    totals = manifest.totals
    assert (totals.rows, totals.samples, totals.rejected, totals.candidates) == (8, 7, 6, 13)
    assert verify_dataset(lists).faults == []


def test_the_result_does_not_depend_on_workers(lists: Path, tmp_path: Path) -> None:
    again = build_lists(tmp_path, rows_per_shard=3, workers=2)
    ours, theirs = tree_bytes(again), tree_bytes(lists)
    assert {name for name in ours if ours[name] != theirs[name]} <= {"manifest.json"}  # it names the source's path


def test_without_lists_the_manifest_is_that_of_format_1_0(tmp_path: Path) -> None:
    directory = build_lists(tmp_path, [{"form": "bare", "samples": ["One."]}, {"form": "bare", "samples": [""]}])
    assert "extra_candidates" not in (directory / "manifest.json").read_text()
    assert "sample" not in open_dataset(directory).metadata(0)
    assert verify_dataset(directory).faults == []


_SAMPLES = st.lists(st.sampled_from(["Yes.", "", None]), max_size=4)
_ROWS = st.one_of(
    st.builds(lambda s: {"form": "bare", "samples": s[:1]}, st.lists(st.sampled_from(["Yes.", ""]), min_size=1)),
    st.builds(lambda form, s: {"form": form, "samples": s}, st.sampled_from(["list", "tuple", "generator"]), _SAMPLES),
)


@given(rows=st.lists(_ROWS, min_size=1, max_size=6), rows_per_shard=st.integers(1, 4))
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
def test_any_mixture_is_accounted_for(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], rows_per_shard: int
) -> None:
    directory = build_lists(tmp_path_factory.mktemp("any"), rows, rows_per_shard=rows_per_shard)
    dataset, totals = open_dataset(directory), Manifest.read(directory).totals
    expected = [
        sample_key(n, None if row["form"] == "bare" else i, len(row["samples"]))
        for n, row in enumerate(rows)
        for i, answer in enumerate(row["samples"])
        if answer
    ]
    assert dataset.index.keys.to_pylist() == expected == sorted(expected)
    assert totals.candidates == sum(max(1, len(row["samples"])) for row in rows) == totals.samples + totals.rejected
    assert verify_dataset(directory).faults == []


@given(row=st.integers(0, 10**9 - 2), of=st.integers(1, 20_000), data=st.data())
def test_keys_of_a_list_sort_as_its_elements_and_hold_no_dot(row: int, of: int, data: st.DataObject) -> None:
    a, b = data.draw(st.integers(0, of - 1)), data.draw(st.integers(0, of - 1))
    first, second = sample_key(row, a, of), sample_key(row, b, of)
    assert (first < second) == (a < b)
    assert "." not in first
    assert parse_key(first) == (row, a)
    assert parse_key(sample_key(row)) == (row, -1)
    assert sample_key(row) < first < sample_key(row + 1)


@pytest.mark.parametrize("key", ["17", "000000017-", "000000017-0", "000000017.000", "a", "٠٠٠٠٠٠٠١٧"])
def test_other_texts_are_no_keys(key: str) -> None:
    assert parse_key(key) is None


@pytest.mark.parametrize("made", [None, {}, "text", 3, Conversation])
def test_what_is_no_conversation_is_named(made: Any) -> None:
    with pytest.raises(TypeError, match=f"the recipe returned (None|an? {type(made).__name__}); it must return a Conv"):
        candidates_of(lambda row: made, Row(0, {}))


def test_an_element_that_is_no_conversation_is_rejected_alone() -> None:
    row = Row(0, {"form": "list", "samples": ["Yes."]})
    (good,) = candidates_of(load_recipe(NAME), row)
    _, wrong = candidates_of(lambda row: [good.made, None], row)
    assert "element 1 is None; it must be a Conversation" in str(wrong.made)
