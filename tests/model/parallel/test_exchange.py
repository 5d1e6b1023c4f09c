"""What exchanges under context parallelism do on one rank; test_layouts.py runs them on several."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("megatron.core")

from vlmdata.model.parallel.exchange import _ByRank, _Reordered


@given(
    tokens=st.integers(1, 5),
    shares=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    ranks=st.sampled_from([1, 2, 3, 4]),
    seed=st.integers(0, 9),
)
def test_each_rank_gets_its_share_of_each_section_as_in_megatron_core(
    tokens: int, shares: list[int], ranks: int, seed: int
) -> None:
    from megatron.core.ssm.gated_delta_net.common import _build_head_perm_for_split_sections

    sections = tuple(share * ranks for share in shares)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, sum(sections), generator=generator, requires_grad=True)
    columns = _build_head_perm_for_split_sections(sections, ranks, torch.device("cpu"))
    wanted = torch.cat(x.index_select(-1, columns).chunk(ranks, -1))
    found = _ByRank.apply(x, sections, ranks)
    assert torch.equal(found, wanted)
    pull = torch.randn(wanted.shape, generator=generator)
    assert torch.equal(*(torch.autograd.grad(each, x, pull)[0] for each in (found, wanted)))


@given(st.permutations(range(7)))
def test_rows_in_another_order_and_their_gradient(order: list[int]) -> None:
    forth = torch.tensor(order)
    x = torch.randn(7, 3, requires_grad=True)
    wanted, found = x.index_select(0, forth), _Reordered.apply(x, forth, forth.argsort())
    assert torch.equal(found, wanted)
    pull = torch.randn(7, 3)
    assert torch.equal(*(torch.autograd.grad(each, x, pull)[0] for each in (found, wanted)))
