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
        rank: Context-parallel rank, ``0 <= rank < size``.

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


def local_ranges(
    starts: npt.ArrayLike, ends: npt.ArrayLike, cu_seqlens_padded: npt.ArrayLike, size: int, rank: int
) -> IntArray:
    """Maps token ranges of the pack (such as images) to one rank's slice.

    A rank holds its tokens in pack order, so its part of a range is contiguous in its slice, even if the
    range crosses several chunks.

    Args:
        starts: (m,) integers, first token of each range in the pack.
        ends: (m,) integers, one past the last token; not below ``starts``, within the pack.
        cu_seqlens_padded: (n + 1,) integers, as for :func:`chunk_ranges`.
        size: Context-parallel size.
        rank: Context-parallel rank.

    Returns:
        int64 (m, 2): ``[start, end)`` in the rank's slice; an empty range if it owns none of the tokens.

    Raises:
        ValueError: See :func:`chunk_ranges`, or if a range is reversed or extends beyond the pack.
    """
    ranges = chunk_ranges(cu_seqlens_padded, size, rank)
    bounds = np.asarray(cu_seqlens_padded).astype(np.int64)
    edges = np.stack([np.asarray(starts).astype(np.int64), np.asarray(ends).astype(np.int64)], axis=-1)
    if edges.size and ((edges[:, 0] > edges[:, 1]).any() or edges.min() < 0 or edges.max() > bounds[-1]):
        raise ValueError(
            f"token ranges must satisfy 0 <= start <= end <= {bounds[-1]}, got starts down to {edges[:, 0].min()} and "
            f"ends up to {edges[:, 1].max()}"
        )
    if not edges.size or len(bounds) == 1:
        return np.zeros(edges.shape, np.int64)
    return _owned_before(edges, bounds, ranges)


def images_in_slice(
    starts: npt.ArrayLike, ends: npt.ArrayLike, cu_seqlens_padded: npt.ArrayLike, size: int, rank: int
) -> npt.NDArray[np.bool_]:
    """Returns which images have at least one token in a rank's slice.

    Args:
        starts: (m,) integers, first image token of each image in the pack.
        ends: (m,) integers, one past the last image token.
        cu_seqlens_padded: (n + 1,) integers, as for :func:`chunk_ranges`.
        size: Context-parallel size.
        rank: Context-parallel rank.

    Returns:
        bool (m,).

    Raises:
        ValueError: See :func:`local_ranges`.
    """
    ranges = local_ranges(starts, ends, cu_seqlens_padded, size, rank)
    return ranges[:, 1] > ranges[:, 0]


def _owned_before(positions: IntArray, bounds: IntArray, ranges: IntArray) -> IntArray:
    """Counts the rank's tokens before each pack position. The result has the shape of ``positions``."""
    owned = (ranges[:, :, 1] - ranges[:, :, 0]).sum(1)
    before_sample = np.concatenate([[0], np.cumsum(owned)[:-1]])
    # The sample of each position. A position at the end of the pack belongs to the last sample.
    sample = np.clip(np.searchsorted(bounds, positions, side="right") - 1, 0, len(bounds) - 2)
    count = before_sample[sample]
    for half in (0, 1):
        start, end = ranges[sample, half, 0], ranges[sample, half, 1]
        count = count + np.clip(positions - start, 0, end - start)
    return count


def concatenated_ranges(starts: IntArray, lengths: IntArray) -> IntArray:
    """Concatenates ``arange(start, start + length)`` over all pairs."""
    total = int(lengths.sum())
    offsets = np.cumsum(lengths) - lengths
    indices: IntArray = np.arange(total, dtype=np.int64) + np.repeat(starts - offsets, lengths)
    return indices
