"""Token alignment: the multiple to which each sample is padded in a pack."""

import math

import numpy as np
import numpy.typing as npt

from vlmdata.errors import UsageError
from vlmdata.packing.arrays import IntArray


def alignment(
    context_parallel: int = 1, tensor_parallel: int = 1, sequence_parallel: bool = True, extra: int = 1
) -> int:
    """Returns the smallest multiple to which each sample must be padded for a parallel layout.

    A context-parallel rank owns 2 of a sample's ``2 * CP`` equal chunks, so sample lengths are multiples of ``2 * CP``.
    Sequence parallelism scatters the tokens of a context-parallel rank over TP ranks. This needs a multiple of TP, or
    of ``CP * TP`` before the context-parallel split.

    Args:
        context_parallel: Context-parallel size CP, at least 1.
        tensor_parallel: Tensor-parallel size TP, at least 1.
        sequence_parallel: Whether TP ranks scatter the sequence between layers. Without it, TP needs no alignment.
        extra: A further multiple (such as 16 or 32 for FP8 kernels), at least 1.

    Returns:
        The least common multiple of all applicable multiples, in tokens.

    Raises:
        UsageError: If a size is below 1.
    """
    for name, value in (("context_parallel", context_parallel), ("tensor_parallel", tensor_parallel), ("extra", extra)):
        if value < 1:
            raise UsageError(f"{name} is {value}; it must be at least 1")
    scattered = tensor_parallel if sequence_parallel else 1
    if context_parallel == 1:
        return math.lcm(scattered, extra)
    return math.lcm(2 * context_parallel, context_parallel * scattered, extra)


def aligned(lengths: npt.ArrayLike, multiple: int) -> IntArray:
    """Rounds token counts, integers of any shape, up to a multiple of at least 1 token; int64.

    Raises:
        UsageError: If ``multiple`` is below 1.
    """
    if multiple < 1:
        raise UsageError(f"multiple is {multiple}; it must be at least 1")
    # Convert to int64 before the addition: int32 lengths near the maximum would wrap.
    wide = np.asarray(lengths).astype(np.int64)
    if multiple == 1:
        return wide
    wide += multiple - 1
    wide //= multiple
    wide *= multiple
    return wide
