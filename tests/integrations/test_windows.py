"""Masks of segments and keys that images see, against the masks that transformers makes of Gemma 4."""

from __future__ import annotations

import inspect
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlmdata.integrations.segments import Segments
from vlmdata.integrations.windows import SlidingWindows, runs_within, spans_of_tokens

#: Tokens of a segment: whether each belongs to an image. Images at both ends, and several without text between them.
segment = st.lists(st.tuples(st.booleans(), st.integers(1, 6)), min_size=1, max_size=5).map(
    lambda runs: [is_image for is_image, length in runs for _ in range(length)]
)


def masks_of_transformers(segments: list[list[bool]], window: int) -> torch.Tensor:
    """bool (T, T) of a pack: those of each sample alone, on the diagonal.

    transformers finds samples of a pack by their positions, but 5.24 then looks up the images of the first sample for
    all.
    """
    return torch.block_diag(*(_mask_of_transformers(torch.tensor(each), window) for each in segments)).bool()


def _mask_of_transformers(marks: torch.Tensor, window: int) -> torch.Tensor:
    from transformers.models.gemma4.modeling_gemma4 import (
        create_masks_for_vision_model,
        get_block_sequence_ids_for_mask,
    )

    cache = {"cache", "past_key_values"} & inspect.signature(create_masks_for_vision_model).parameters.keys()
    config: Any = SimpleNamespace(_attn_implementation="sdpa", sliding_window=window, is_causal=True)
    masks = create_masks_for_vision_model(
        config=config,
        inputs_embeds=torch.zeros(1, len(marks), 1),
        attention_mask=None,
        position_ids=torch.arange(len(marks))[None],
        **dict.fromkeys(cache),
        block_sequence_ids=get_block_sequence_ids_for_mask(marks[None].long(), marks.device),
    )
    found: torch.Tensor = masks["sliding_attention"][0, 0]
    return found


@given(st.lists(segment, min_size=2, max_size=4), st.integers(1, 9))
def test_masks_equal_those_of_transformers(segments: list[list[bool]], window: int) -> None:
    marks = torch.tensor([each for segment in segments for each in segment])
    bounds = [0, *accumulate(map(len, segments))]
    windows = SlidingWindows(
        window, tuple(map(len, segments)), runs_within(spans_of_tokens(marks), bounds), marks.device
    )
    wanted = masks_of_transformers(segments, window)
    found = torch.zeros_like(wanted)
    for (start, stop), mask in zip(pairwise(bounds), windows.masks, strict=True):
        plain = torch.ones(stop - start, stop - start, dtype=torch.bool).tril()
        found[start:stop, start:stop] = plain if mask is None else mask[0, 0]
    assert torch.equal(found, wanted)
    assert_seen_keys(windows, wanted)


def assert_seen_keys(windows: SlidingWindows, wanted: torch.Tensor) -> None:
    """Within the window of each query, the keys are those that the mask lets it see."""
    seen = windows.seen_keys
    if seen is None:
        assert not windows.runs
        return
    bounds = zip(pairwise(seen.query_bounds.tolist()), pairwise(seen.key_bounds.tolist()), strict=True)
    for (begin, end), (first, last) in bounds:
        queries, keys = seen.queries[begin:end].tolist(), seen.keys[first:last].tolist()
        assert queries[-1] == keys[-1]
        assert len(queries) <= seen.longest_query
        assert len(keys) <= seen.longest_key
        for number, query in enumerate(queries):
            place = number + len(keys) - len(queries)
            own = keys[max(0, place - windows.left) if windows.left >= 0 else 0 :]
            assert own == wanted[query].nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("spans", "bounds", "runs"),
    [
        ([(2, 4), (6, 8)], [0, 10], ((2, 4), (6, 8))),
        ([(2, 4), (4, 8)], [0, 10], ((2, 8),)),  # no token between: transformers sees one image
        ([(2, 5), (5, 8)], [0, 5, 10], ((2, 5), (5, 8))),  # the end of a sample and the start of the next
        ([(2, 8)], [0, 5, 5, 10], ((2, 5), (5, 8))),
        ([], [0, 10], ()),
    ],
)
def test_runs_end_with_their_segment(spans: Any, bounds: list[int], runs: Any) -> None:
    assert runs_within(spans, bounds) == runs


def test_runs_of_marked_tokens() -> None:
    assert spans_of_tokens(torch.tensor([True, True, False, True])) == [(0, 2), (3, 4)]
    assert spans_of_tokens(torch.zeros(3, dtype=torch.bool)) == []
    assert spans_of_tokens(torch.tensor(np.ones(2, bool))) == [(0, 2)]


def test_masks_are_made_once() -> None:
    segments = Segments.of_bounds([0, 3, 9], torch.device("cpu"))
    assert segments is not None
    windows = segments.windows(4)
    assert windows is not None
    assert windows is segments.windows(4)
    assert [mask is None for mask in windows.masks] == [True, False]
    assert windows.masks is windows.masks
    assert segments.windows(None) is None
    assert segments.with_runs(((4, 6),)).windows(4) is not windows
