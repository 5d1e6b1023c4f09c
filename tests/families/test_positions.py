"""MRoPE positions against the rule, and the places of images in a sequence."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmdata.families import family
from vlmdata.families.positions import locate_blocks, mrope_position_ids

IMAGE, MERGE = 9, 2
counts_of = family("qwen3_5").token_counts


def located(ids: np.ndarray, counts: np.ndarray) -> np.ndarray:
    return locate_blocks(ids, counts, np.full(counts.sum(), IMAGE), (IMAGE,))


grids = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5)).map(lambda g: (g[0], 2 * g[1], 2 * g[2])),
    max_size=4,
)


@st.composite
def sequences(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Ids with images at random places, touching ones among them; and their grids."""
    sizes = draw(grids)
    ids: list[int] = [1] * draw(st.integers(0, 5))
    for t, h, w in sizes:
        ids += [IMAGE] * (t * h * w // 4) + [1] * draw(st.integers(0, 3))
    return np.array(ids, dtype=np.int32), np.array(sizes, dtype=np.int32).reshape(-1, 3)


def by_the_rule(ids: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Token by token, as the paper says it."""
    out, position, i, image = [], 0, 0, 0
    while i < len(ids):
        if ids[i] != IMAGE:
            out.append((position, position, position))
            position, i = position + 1, i + 1
            continue
        t, h, w = sizes[image].tolist()
        block = product(range(t), range(h // 2), range(w // 2))
        out += [(position + frame, position + row, position + column) for frame, row, column in block]
        i += t * h * w // 4
        position += max(h, w) // 2
        image += 1
    return np.array(out, dtype=np.int32).reshape(-1, 3).T


@given(sequences())
def test_positions_follow_the_rule(sequence: tuple[np.ndarray, np.ndarray]) -> None:
    ids, sizes = sequence
    starts = located(ids, counts_of(sizes))
    positions = mrope_position_ids(len(ids), starts, sizes, MERGE)
    assert positions.dtype == np.int32
    assert np.array_equal(positions, by_the_rule(ids, sizes))


@given(sequences())
def test_images_are_found_one_by_one_even_where_they_touch(sequence: tuple[np.ndarray, np.ndarray]) -> None:
    ids, sizes = sequence
    starts = located(ids, counts_of(sizes))
    counts = counts_of(sizes)
    covered = np.concatenate([np.arange(s, s + c) for s, c in zip(starts, counts, strict=True)] or [np.zeros(0, int)])
    assert np.array_equal(covered, np.flatnonzero(ids == IMAGE))


def test_the_example_of_the_design() -> None:
    """Two text tokens, an image of 1x4x6 patches (2 by 3 tokens), one text token."""
    positions = mrope_position_ids(9, np.array([2]), np.array([[1, 4, 6]]), MERGE)
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5],
        [0, 1, 2, 2, 2, 3, 3, 3, 5],
        [0, 1, 2, 3, 4, 2, 3, 4, 5],
    ]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([IMAGE] * 5, r"5 image tokens in the sequence, but the image grids \(1\) need 6"),
        ([IMAGE] * 3 + [1] + [IMAGE] * 3, "image 0: its 6 tokens are not contiguous"),
    ],
)
def test_broken_image_blocks_are_refused(ids: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        located(np.array(ids), np.array([6]))
