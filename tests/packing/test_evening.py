"""Exchanging samples of equal size until few bins exceed the second limit."""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmdata.packing.bins import evening, two_limits
from vlmdata.packing.bins.evening import even_out
from vlmdata.packing.bins.one_limit import pack_sizes
from vlmdata.packing.bins.two_limits import Limits, Window, pack_windows
from vlmdata.packing.seeding import hash64


def excess(labels: np.ndarray, other: np.ndarray, limit: int) -> int:
    return int(np.maximum(np.bincount(labels, other).astype(np.int64) - limit, 0).sum())


@st.composite
def packings(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Labels without an empty bin, sizes, use of the other limit, and that limit."""
    count = draw(st.integers(1, 60))
    column = st.lists(st.integers(0, 9), min_size=count, max_size=count)
    labels = np.unique(draw(column), return_inverse=True)[1].astype(np.int64)
    sizes, other = (np.array(draw(column), np.int64) for _ in range(2))
    return labels, sizes, other, draw(st.integers(1, 30))


@given(packings())
def test_bins_keep_their_sizes_and_the_excess_is_halved_or_nothing_changes(
    case: tuple[np.ndarray, np.ndarray, np.ndarray, int],
) -> None:
    labels, sizes, other, limit = case
    given_labels = labels.copy()
    found = even_out(labels, sizes, other, limit)
    pairs = [Counter(zip(each.tolist(), sizes.tolist(), strict=True)) for each in (labels, found)]
    assert pairs[0] == pairs[1]
    assert labels.tolist() == given_labels.tolist()
    if found is not labels:
        assert 2 * excess(found, other, limit) < excess(labels, other, limit)
    with pytest.MonkeyPatch.context() as patch:  # a sweep that makes it worse does not count
        patch.setattr(evening, "_MAX_SWEEPS", 1)
        first = even_out(labels, sizes, other, limit)
    assert excess(found, other, limit) <= excess(first, other, limit)


def test_heavy_items_change_places_with_light_ones() -> None:
    # One item of each size in a bin; all heavy ones are in the first two bins.
    sizes = np.tile(np.arange(1, 5), 4)
    labels = np.repeat(np.arange(4), 4)
    other = np.where(labels < 2, 6, 0)
    found = even_out(labels, sizes, other, 12)
    assert np.bincount(found, other).tolist() == [12, 12, 12, 12]


def test_many_items_of_one_size_change_places() -> None:
    labels = np.repeat(np.arange(500), 8)
    other = np.where(labels < 250, 10, 0)
    found = even_out(labels, np.full(4000, 7), other, 50)
    assert excess(found, other, 50) < 0.02 * excess(labels, other, 50)


def test_items_of_another_size_stay() -> None:
    labels = np.array([0, 0, 1, 1], np.int64)
    assert even_out(labels, np.array([1, 2, 3, 4]), np.array([9, 9, 0, 0]), 10) is labels


def test_packs_that_tokens_decide_stay_near_the_tokens_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = hash64(8000, 11)
    image = (900 + noise % np.uint64(77)).astype(np.int64)
    text = (50 + (noise >> np.uint64(20)) % np.uint64(500)).astype(np.int64)
    tokens, patches = image + text, np.where(noise >> np.uint64(40) & np.uint64(7), 4 * image, 0)
    window, limits = [Window(tokens, patches, 0)], Limits(8192, 24_000)
    free = pack_sizes(tokens, 8192, 0).num_bins
    evened = pack_windows(window, limits, 0)[0]
    assert evened.sums(tokens).max() <= 8192
    assert evened.sums(patches).max() <= 24_000
    assert evened.num_bins <= 1.008 * free
    # Pinned, as in test_patterns.py.
    pinned = np.concatenate([evened.items, evened.offsets]).astype("<i8").tobytes()
    assert hashlib.sha256(pinned).hexdigest()[:16] == "0a84421a2ca7623e"
    monkeypatch.setattr(two_limits, "even_out", lambda labels, *rest: labels)
    monkeypatch.setattr(two_limits, "exchange", lambda labels, *rest: labels)
    assert pack_windows(window, limits, 0)[0].num_bins > 1.02 * free
