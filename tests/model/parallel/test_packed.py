"""What layers need of a pack's boundaries: computed on the host, equal to what others compute on the device."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("megatron.core")

from model.parallel.packed import PackIndex, PackParams

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
