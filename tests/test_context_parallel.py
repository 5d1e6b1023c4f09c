from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmdata.context_parallel import chunk_ranges, partition_indices


def reference(cu_seqlens: list[int], size: int, rank: int) -> list[int]:
    """Token by token: cut each sample in 2 * size chunks, keep chunks rank and 2 * size - 1 - rank."""
    owned = []
    for start, end in pairwise(cu_seqlens):
        chunk = (end - start) // (2 * size)
        owned += [t for t in range(start, end) if chunk and (t - start) // chunk in (rank, 2 * size - 1 - rank)]
    return owned


@st.composite
def packs(draw: st.DrawFn) -> tuple[list[int], int]:
    size = draw(st.integers(2, 5))
    pieces = draw(st.lists(st.integers(0, 6), min_size=1, max_size=8))
    return np.concatenate([[0], np.cumsum(np.array(pieces) * 2 * size)]).tolist(), size


def test_the_example_of_the_design() -> None:
    got = partition_indices([0, 16, 48], 48, 2, 0)
    assert got.dtype == np.int64
    assert got.tolist() == [*range(4), *range(12, 16), *range(16, 24), *range(40, 48)]


@given(packs())
def test_equals_brute_force_and_covers_the_pack_once(case: tuple[list[int], int]) -> None:
    cu_seqlens, size = case
    total = cu_seqlens[-1]
    slices = [partition_indices(cu_seqlens, total, size, rank).tolist() for rank in range(size)]
    assert slices == [reference(cu_seqlens, size, rank) for rank in range(size)]
    assert sorted(chain.from_iterable(slices)) == list(range(total))
    assert {len(part) for part in slices} == {total // size}


@given(packs())
def test_chunks_name_the_same_tokens(case: tuple[list[int], int]) -> None:
    cu_seqlens, size = case
    for rank in range(size):
        ranges = chunk_ranges(cu_seqlens, size, rank)
        assert ranges.shape == (len(cu_seqlens) - 1, 2, 2)
        tokens = [t for start, end in ranges.reshape(-1, 2).tolist() for t in range(start, end)]
        assert tokens == partition_indices(cu_seqlens, cu_seqlens[-1], size, rank).tolist()


def test_size_one_owns_everything() -> None:
    assert partition_indices([0, 3, 10], 10, 1, 0).tolist() == list(range(10))


def test_empty_pack() -> None:
    assert partition_indices([0], 0, 2, 1).tolist() == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0, 6], 6, 2, 0), "sample 0 has 6 padded tokens, not a multiple of .* = 4"),
        (([0, 8, 4], 4, 2, 0), "decreases at 1: 8 to 4"),
        (([4, 8], 8, 2, 0), "start at 0"),
        (([0, 8], 16, 2, 0), "ends at 8, but the pack has 16"),
        (([0, 8], 8, 2, 2), "rank 2 of size 2"),
        (([0, 8], 8, 0, 0), "size 0"),
    ],
)
def test_bad_input_is_refused(arguments: tuple[list[int], int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition_indices(*arguments)


@pytest.mark.gpu
def test_equals_transformer_engine() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from vlmdata.model.parallel.environment import before_megatron

    before_megatron()  # loads torch's cuDNN, so that Transformer Engine does not load another one
    pytest.importorskip("transformer_engine.pytorch")  # it finds and loads the library of the next line
    import transformer_engine_torch

    rng = np.random.default_rng(0)
    compared = 0
    for size in (2, 3, 4, 8):
        for samples in (1, 2, 7, 100):
            pieces = rng.integers(1, 40, samples) * 2 * size
            cu_seqlens = np.concatenate([[0], np.cumsum(pieces)]).astype(np.int32)
            total = int(cu_seqlens[-1])
            on_device = torch.from_numpy(cu_seqlens).cuda()
            for rank in range(size):
                theirs = transformer_engine_torch.thd_get_partitioned_indices(on_device, total, size, rank)
                assert theirs.tolist() == partition_indices(cu_seqlens, total, size, rank).tolist()
                compared += 1
    assert compared == 4 * (2 + 3 + 4 + 8)
