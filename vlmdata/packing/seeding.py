"""Seeded orders that are equal on every platform and for every numpy version.

numpy guarantees stable raw streams but not a stable ``Generator.permutation``, and Python's ``hash`` differs between
processes. A plan must be equal on every rank, so orders come from sorting counter-based hashes. Keys are unique, since
they include the position, so the result does not depend on the sorting algorithm.
"""

import hashlib

import numpy as np
import numpy.typing as npt

from vlmdata.packing.arrays import IntArray

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
# With fewer random bits besides group and position, ties would make the storage order visible.
_MIN_RANDOM_BITS = 20


def derive_key(*parts: int | str) -> int:
    """Hashes what identifies a stream (seed, epoch, name, …) to its key: the first 8 bytes of SHA-256."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def hash64(count: int, key: int) -> npt.NDArray[np.uint64]:
    """Returns the first ``count`` outputs of SplitMix64 seeded with the low 64 bits of ``key``, uint64 (count,).

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    z = np.arange(1, count + 1, dtype=np.uint64)
    z *= np.uint64(_GOLDEN)
    z += np.uint64(key & _MASK)
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def permutation(count: int, key: int) -> IntArray:
    """Returns a seeded permutation of ``range(count)``, int64 (count,); for the key see :func:`derive_key`."""
    return grouped_permutation(np.zeros(count, np.int8), 1, key)


def grouped_permutation(groups: npt.NDArray[np.integer], num_groups: int, key: int) -> IntArray:
    """Orders positions by group, (n,) integers from 0, in seeded random order within each group; int64 (n,).

    Group, hash and position share one 64-bit key, so that numpy's vectorised value sort can be used; it is several
    times faster than an argsort.
    """
    hashes = hash64(len(groups), key)
    group_bits = max(num_groups - 1, 0).bit_length()
    position_bits = max(len(hashes) - 1, 0).bit_length()
    random_bits = 64 - group_bits - position_bits
    if random_bits < _MIN_RANDOM_BITS:
        order = np.argsort(hashes, kind="stable")
        return order[np.argsort(groups[order], kind="stable")]
    keys = hashes >> np.uint64(group_bits)  # free the top bits for the group
    keys >>= np.uint64(position_bits)
    keys <<= np.uint64(position_bits)
    keys |= np.arange(len(hashes), dtype=np.uint64)
    if group_bits:
        keys |= groups.astype(np.uint64) << np.uint64(64 - group_bits)
    keys.sort()
    keys &= np.uint64((1 << position_bits) - 1)
    return keys.astype(np.int64)
