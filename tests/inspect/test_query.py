"""The search language, against a plain loop over raw samples."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.inspect.raw import RawSample
from vlmdata.format.dataset import VlmDataset
from vlmdata.inspect.findings import IndexFindings
from vlmdata.inspect.query import FIELDS, SORTS, candidates, parse_query, sample_text, search
from vlmdata.inspect.tokens import TokenTexts

VALUES: dict[str, Any] = {
    "target": lambda s: int(s.mask.sum()) / s.length,
    "targets": lambda s: int(s.mask.sum()),
    "length": lambda s: s.length,
    "patches": lambda s: len(s.arrays["patches"]),
    "images": lambda s: len(s.grids),
    "row": lambda s: s.metadata["source_row"],
    "turns": lambda s: s.metadata["target_turns"],
}
COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "=": operator.eq}


@given(data=st.data())
def test_conditions_select_what_a_loop_selects(
    data: st.DataObject, mixed_dataset: VlmDataset, mixed_raw: list[RawSample]
) -> None:
    samples = st.sampled_from(mixed_raw)
    terms = data.draw(st.lists(st.tuples(st.sampled_from(FIELDS), st.sampled_from(list(COMPARE)), samples)))
    # Bounds that occur, so that equality and its neighbours are met.
    bounds = [(f, c, round(VALUES[f](sample), 3)) for f, c, sample in terms]
    query = parse_query(" ".join(f"{f}{c}{value}" for f, c, value in bounds))
    expected = [i for i, s in enumerate(mixed_raw) if all(COMPARE[c](VALUES[f](s), value) for f, c, value in bounds)]
    assert candidates(IndexFindings(mixed_dataset.index, mixed_dataset.family), query).tolist() == expected


@pytest.mark.parametrize("sort", SORTS)
def test_orders_are_those_of_their_names(sort: str, demo_dataset: VlmDataset, demo_raw: list[RawSample]) -> None:
    keys: dict[str, Any] = {
        "stored": lambda s: 0,
        "longest": lambda s: -s.length,
        "shortest": lambda s: s.length,
        "patches": lambda s: -len(s.arrays["patches"]),
        "target": lambda s: s.mask.sum() / s.length,
    }
    found = candidates(IndexFindings(demo_dataset.index, demo_dataset.family), parse_query("", sort)).tolist()
    assert found == sorted(range(len(demo_raw)), key=lambda i: (keys[sort](demo_raw[i]), i))


def test_shares_may_be_percent_and_numbers_have_commas() -> None:
    one, other = parse_query("target<5% patches>4,000").conditions
    assert (one.field, one.operator, one.value) == ("target", "<", 0.05)
    assert (other.field, other.operator, other.value) == ("patches", ">", 4000)


@pytest.mark.parametrize("text", ["colour<3", "is:odd", "length<3x", "target>5.5.5"])
def test_what_looks_like_a_condition_but_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="conditions are FIELD<NUMBER"):
        parse_query(text)


def test_other_words_are_text() -> None:
    assert parse_query("a <b> is truncated <s_x>=3 length<9").text == "a <b> is truncated <s_x>=3"


def test_text_is_found_in_any_case_and_keys_too(mixed_dataset: VlmDataset) -> None:
    texts = TokenTexts(mixed_dataset.directory, mixed_dataset.manifest)
    order = np.arange(len(mixed_dataset))
    whole = [sample_text(mixed_dataset, texts, i) for i in order.tolist()]
    for wanted in ("NOISE", "two and two", "000000006", "nowhere", "<|image_pad|>"):
        expected = [i for i, text in enumerate(whole) if wanted.casefold() in text.casefold()]
        if wanted == "000000006":
            expected = [mixed_dataset.index.position_of(wanted)]
        assert list(search(mixed_dataset, texts, order, wanted).samples) == expected
    assert max(text.count("<|image_pad|>") for text in whole) <= 2  # one a picture


def test_a_whole_key_finds_its_sample_at_once(demo_dataset: VlmDataset) -> None:
    facts = IndexFindings(demo_dataset.index, demo_dataset.family)
    assert candidates(facts, parse_query("000000005", "longest")).tolist() == [5]
    assert candidates(facts, parse_query("000000005 row<3")).tolist() == []
    assert len(candidates(facts, parse_query("00000000"))) == len(demo_dataset)


def test_a_search_goes_on_where_it_stopped(demo_dataset: VlmDataset) -> None:
    texts = TokenTexts(demo_dataset.directory, demo_dataset.manifest)
    order = np.arange(len(demo_dataset))
    found: list[int] = []
    start, rounds, done = 0, 0, False
    while not done:
        hits = search(demo_dataset, texts, order, "describe", start=start, limit=3, seconds=0.0)
        assert hits.searched > start
        found += hits.samples
        start, done, rounds = hits.searched, hits.done, rounds + 1
    assert found == order.tolist()
    assert rounds == len(order)  # out of time after each, but never without progress
