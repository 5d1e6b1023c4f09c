"""The zigzag context-parallel split of a packed (THD) batch.

Each sample is cut into ``2 * size`` equal chunks. Rank r owns chunks r and ``2 * size - 1 - r``, with samples in order.
Under causal attention early chunks are cheap and late ones expensive, so each rank gets the same work from each sample.
The token order equals Transformer Engine's ``thd_get_partitioned_indices(cu_seqlens_padded, total_tokens, size,
rank)``.

Everything here follows from the sample boundaries, so a rank knows which tokens it owns before it reads any data.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vlmdata.wording import counted

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Slice:
    """The part of a pack that one context-parallel rank holds."""

    rank: int
    size: int


def chunk_ranges(cu_seqlens_padded: npt.ArrayLike, size: int, rank: int) -> IntArray:
    """Returns the token ranges of a pack that one context-parallel rank owns.

    Args:
        cu_seqlens_padded: (n + 1,) integers, sample boundaries in tokens, from 0, non-decreasing; every sample's padded
            length must be a multiple of ``2 * size`` (any length if ``size`` is 1).
        size: Context-parallel size.
        rank: Context-parallel rank.

    Returns:
        int64 (n, 2, 2): for each sample its early and its late chunk, each as ``[start, end)`` in pack tokens. For
        the last rank the two touch; for ``size`` 1 they are the two halves of the sample.

    Raises:
        ValueError: If the rank or the boundaries are out of order, or a sample does not divide into the chunks.
    """
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"context-parallel rank {rank} of size {size}: need size >= 1 and 0 <= rank < size")
    bounds = np.asarray(cu_seqlens_padded).astype(np.int64)
    if bounds.ndim != 1 or bounds.size < 1 or bounds[0] != 0:
        raise ValueError(f"cu_seqlens_padded must be one-dimensional and start at 0, got {bounds[:4].tolist()}")
    lengths = np.diff(bounds)
    if (lengths < 0).any():
        at = int(np.argmax(lengths < 0))
        raise ValueError(f"cu_seqlens_padded decreases at {at}: {bounds[at]} to {bounds[at + 1]}")
    starts, ends = bounds[:-1], bounds[1:]
    if size == 1:
        middle = starts + lengths // 2
        return np.stack([np.stack([starts, middle], 1), np.stack([middle, ends], 1)], 1)
    chunk, rest = np.divmod(lengths, 2 * size)
    if rest.any():
        at = int(np.argmax(rest != 0))
        raise ValueError(
            f"sample {at} has {lengths[at]} padded tokens, not a multiple of 2 * context-parallel size = {2 * size}; "
            f"plan with alignment {2 * size} or a multiple of it"
        )
    early = starts + rank * chunk
    late = starts + (2 * size - 1 - rank) * chunk
    return np.stack([np.stack([early, early + chunk], 1), np.stack([late, late + chunk], 1)], 1)


def partition_indices(cu_seqlens_padded: npt.ArrayLike, total_tokens: int, size: int, rank: int) -> IntArray:
    """Returns the indices of the tokens that one context-parallel rank owns, in its order.

    Args:
        cu_seqlens_padded: (n + 1,) integers, as for :func:`chunk_ranges`.
        total_tokens: Tokens of the pack; must equal ``cu_seqlens_padded[-1]`` (a tail is its own segment).
        size: Context-parallel size.
        rank: Context-parallel rank.

    Returns:
        int64 (total_tokens / size,), increasing.

    Raises:
        ValueError: See :func:`chunk_ranges`, or if ``total_tokens`` is not the last boundary.
    """
    ranges = chunk_ranges(cu_seqlens_padded, size, rank)
    last = int(np.asarray(cu_seqlens_padded)[-1])
    if last != total_tokens:
        raise ValueError(f"cu_seqlens_padded ends at {last}, but the pack has {counted(total_tokens, 'token')}")
    starts = ranges[:, :, 0].ravel()
    lengths = ranges[:, :, 1].ravel() - starts
    return concatenated_ranges(starts, lengths)


def concatenated_ranges(starts: IntArray, lengths: IntArray) -> IntArray:
    """Concatenates ``arange(start, start + length)`` over all pairs."""
    total = int(lengths.sum())
    offsets = np.cumsum(lengths) - lengths
    indices: IntArray = np.arange(total, dtype=np.int64) + np.repeat(starts - offsets, lengths)
    return indices
