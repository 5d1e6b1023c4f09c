"""What layers need of a pack's boundaries: computed on the host, equal to what others compute on the device."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("megatron.core")

from vlmdata.model.parallel.packed import PackIndex, PackParams

CPU = torch.device("cpu")


def params_of(lengths: list[int], context_size: int = 1) -> PackParams:
    bounds = np.cumsum([0, *lengths])
    index = PackIndex.of_boundaries(bounds, bounds, context_size, 0)
    return index.params(max(lengths), context_size, 0, CPU)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=6))
def test_chunks_and_first_tokens(lengths: list[int]) -> None:
    pack = params_of(lengths)
    chunks = [[sample, number] for sample, length in enumerate(lengths) for number in range(-(-length // 64))]
    assert pack.delta_chunks.tolist() == chunks
    assert pack.delta_chunks.is_contiguous()
    starts = [begin for begin, end in itertools.pairwise(pack.bounds) for _ in range(begin, end)]
    assert pack.sample_starts.tolist() == starts
    assert pack.delta_chunks.dtype == pack.sample_starts.dtype == pack.cu_seqlens_q.dtype == torch.int32
    assert pack.delta_chunks is pack.delta_chunks, "made once, not in every layer"


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.sampled_from([2, 4]))
def test_orders_of_tokens_equal_those_of_megatron_core(units: list[int], context_size: int) -> None:
    from megatron.core.ssm.gated_delta_net.common import _build_thd_cp_a2a_perm

    pack = params_of([2 * context_size * unit for unit in units], context_size)
    forth, back = _build_thd_cp_a2a_perm(pack.cu_seqlens_q, context_size, pack.bounds[-1])
    assert torch.equal(pack.gathered_order, forth)
    assert torch.equal(pack.rank_order, back)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 39)), min_size=1, max_size=6),
    st.sampled_from([1, 2, 4]),
    st.data(),
)
def test_the_tokens_of_a_rank_and_those_that_follow(
    samples: list[tuple[int, int]], context_size: int, data: st.DataObject
) -> None:
    unit = 1 if context_size == 1 else 2 * context_size
    padded = [unit * units for units, _ in samples]
    true = [length - min(missing, length) for length, (_, missing) in zip(padded, samples, strict=True)]
    rank = data.draw(st.integers(0, context_size - 1))
    index = PackIndex.of_boundaries(np.cumsum([0, *true]), np.cumsum([0, *padded]), context_size, rank)
    bounds = np.cumsum([0, *padded]).tolist()
    following = [
        token + 1 if token + 1 < begin + length else -1
        for begin, end, length in zip(bounds, bounds[1:], true, strict=False)
        for token in range(begin, end)
    ]
    assert index.following.tolist() == [following[token] for token in index.local.tolist()]
    positions = torch.arange(3 * bounds[-1]).view(3, 1, -1)
    own = index.params(1, context_size, rank, CPU).own_tokens(positions, 2)
    assert torch.equal(own, positions[:, :, torch.from_numpy(index.local)])
    assert context_size > 1 or len(index.local) == bounds[-1]
