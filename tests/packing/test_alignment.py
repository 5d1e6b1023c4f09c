import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmdata.packing.alignment import aligned, alignment

sizes = st.sampled_from([1, 2, 3, 4, 6, 8, 16])


@pytest.mark.parametrize(
    ("context", "tensor", "sequence", "extra", "expected"),
    [
        (1, 1, True, 1, 1),
        (2, 1, True, 1, 4),
        (1, 4, True, 1, 4),
        (1, 4, False, 1, 1),
        (2, 4, True, 1, 8),
        (4, 2, True, 1, 8),
        (3, 2, True, 1, 6),
        (2, 8, False, 1, 4),
        (1, 1, True, 64, 64),
        (3, 1, True, 16, 48),
    ],
)
def test_known_layouts(context: int, tensor: int, sequence: bool, extra: int, expected: int) -> None:
    assert alignment(context, tensor, sequence, extra) == expected


@given(sizes, sizes, st.booleans(), sizes)
def test_every_rank_gets_whole_pieces(context: int, tensor: int, sequence: bool, extra: int) -> None:
    multiple = alignment(context, tensor, sequence, extra)
    assert multiple % extra == 0
    if context > 1:
        assert multiple % (2 * context) == 0
    if sequence:
        assert multiple // context * context == multiple
        assert (multiple // context) % tensor == 0
    # Nothing is asked for beyond that.
    needed = math.lcm(2 * context if context > 1 else 1, context * (tensor if sequence else 1), extra)
    assert multiple == needed


@pytest.mark.parametrize("bad", [{"context_parallel": 0}, {"tensor_parallel": -1}, {"extra": 0}])
def test_sizes_below_one_are_refused(bad: dict[str, int]) -> None:
    (name, value), *_ = bad.items()
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        alignment(**bad)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=20), st.integers(1, 300))
def test_aligned_is_the_least_multiple(lengths: list[int], multiple: int) -> None:
    column = np.array(lengths, dtype=np.int32)
    result = aligned(column, multiple)
    assert result.dtype == np.int64
    assert result.tolist() == [-(-length // multiple) * multiple for length in lengths]
    assert column.tolist() == lengths, "the input must not change"


def test_aligned_leaves_its_input_alone_even_if_int64() -> None:
    column = np.array([1, 5], dtype=np.int64)
    assert aligned(column, 4).tolist() == [4, 8]
    assert aligned(column, 1) is not column
    assert column.tolist() == [1, 5]
    with pytest.raises(ValueError, match="multiple is 0"):
        aligned(column, 0)
