"""Near duplicates: pictures that look alike, and texts that share most of their words.

Pictures are compared by a perceptual hash of 64 bits (the signs of the lowest frequencies of a grey picture of
32 x 32), texts by MinHash over runs of three words. Candidates come from buckets of equal parts of these, so that the
time grows with the number of samples and not with its square; each candidate pair is then compared in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations

import numpy as np
import numpy.typing as npt
import xxhash

#: Bits of a perceptual hash that near pictures may differ in, of 64.
NEAR_BITS = 6
#: Share of runs of words that near texts have in common, at least (Jaccard similarity).
NEAR_SHARE = 0.8
#: Bands of a signature, and numbers in each. Near texts share a band: of texts that share 0.8 of their runs, 99.995 %.
_BANDS, _ROWS = 25, 5
_NUMBERS = _BANDS * _ROWS
_WORDS = 3
_SIDE, _LOW = 32, 8
#: Largest wave of a picture that counts as one colour: less than one of 255 levels.
_FLAT = 0.5 * _SIDE * _SIDE
#: Groups of a bucket that a sample is compared with, at most, so that no data makes the time quadratic.
_COMPARED = 256
#: Parts of a perceptual hash. Of 8 parts, two are equal if at most 6 bits differ.
_PARTS = 8
_SEED = 41

Hashes = npt.NDArray[np.uint64]


def picture_hash(picture: npt.NDArray[np.uint8]) -> int:
    """Returns the perceptual hash of a picture, 64 bits. Size, codec and small changes of colour change few of them.

    Args:
        picture: uint8 (H, W, 3).
    """
    grey = picture.astype(np.float64) @ np.array([0.299, 0.587, 0.114])
    small = _shrunk(_shrunk(grey, 0), 1)
    waves = _cosines()
    low = waves[:_LOW] @ small @ waves[:_LOW].T
    low[0, 0] = 0  # the mean brightness
    if np.abs(low).max() < _FLAT:  # only noise has signs: one colour is known by itself
        return int(xxhash.xxh3_64_intdigest(np.rint(picture.mean((0, 1))).astype(np.uint8).tobytes()))
    return int.from_bytes(np.packbits(low > np.median(low)).tobytes(), "big")


def text_signature(text: str) -> Hashes:
    """Returns the MinHash signature of a text, uint64 (125,). Case and white space do not count.

    The share of equal numbers in two signatures estimates the share of runs of three words that both texts have.
    """
    words = text.casefold().split()
    runs = {" ".join(words[at : at + _WORDS]) for at in range(max(1, len(words) - _WORDS + 1))}
    hashes = np.fromiter((xxhash.xxh3_64_intdigest(run.encode("utf-8", "surrogatepass")) for run in runs), np.uint64)
    factors, masks = _permutations()
    return np.asarray(((hashes[:, None] ^ masks) * factors).min(axis=0), np.uint64)  # modulo 2^64


@dataclass(frozen=True)
class Near:
    """A sample that is near one that comes before it."""

    sample: int  # position of the sample
    kept: int  # position of the first sample of its group
    likeness: float  # share of equal bits or of common runs with the sample that it was found by, from 0 to 1


def near_pictures(positions: Sequence[int], hashes: Sequence[Sequence[int]]) -> list[Near]:
    """Finds samples whose pictures look like those of an earlier sample: as many, in the same order.

    Args:
        positions: Positions of the samples, ascending.
        hashes: The perceptual hashes of the pictures of each; not empty.
    """

    def buckets(each: Sequence[int]) -> Iterator[object]:
        parts = each[0].to_bytes(_PARTS, "big")
        for one, other in combinations(range(_PARTS), 2):
            yield len(each), one, other, parts[one], parts[other]

    def likeness(one: Sequence[int], other: Sequence[int]) -> float:
        bits = [(a ^ b).bit_count() for a, b in zip(one, other, strict=True)]
        return 1 - max(bits) / 64

    return _near(positions, hashes, buckets, likeness, 1 - NEAR_BITS / 64)


def near_texts(positions: Sequence[int], signatures: Sequence[Hashes]) -> list[Near]:
    """Finds samples whose texts share most of their words with that of an earlier sample.

    Args:
        positions: Positions of the samples, ascending.
        signatures: The signature of the text of each.
    """

    def buckets(each: Hashes) -> Iterator[object]:
        for band in range(_BANDS):
            yield band, each[band * _ROWS : (band + 1) * _ROWS].tobytes()

    return _near(positions, signatures, buckets, lambda a, b: float((a == b).mean()), NEAR_SHARE)


def _near[T](
    positions: Sequence[int],
    marks: Sequence[T],
    buckets: Callable[[T], Iterable[object]],
    likeness: Callable[[T, T], float],
    least: float,
) -> list[Near]:
    """Groups samples, in order: each joins the group of the first earlier sample that is like it.

    Only samples that begin a group are compared with later ones. So a group has one kept sample, and each other one is
    like it; chains of small changes are not followed.
    """
    firsts: dict[int, list[int]] = {}
    found = []
    for number, mark in enumerate(marks):
        keys = [xxhash.xxh3_64_intdigest(repr(key).encode()) for key in buckets(mark)]
        candidates = sorted({each for key in keys for each in firsts.get(key, ())})
        like = next(((each, share) for each in candidates if (share := likeness(marks[each], mark)) >= least), None)
        if like is not None:
            found.append(Near(positions[number], positions[like[0]], like[1]))
            continue
        for key in keys:
            own = firsts.setdefault(key, [])
            if len(own) < _COMPARED:
                own.append(number)
    return found


def _shrunk(values: npt.NDArray[np.float64], axis: int) -> npt.NDArray[np.float64]:
    """Returns means over 32 equal parts of an axis; of shorter axes, values at 32 places."""
    size = values.shape[axis]
    if size < _SIDE:
        return values.take(np.arange(_SIDE) * size // _SIDE, axis)
    starts = np.arange(_SIDE) * size // _SIDE
    counts = np.diff(starts, append=size)
    shape = [1, 1]
    shape[axis] = _SIDE
    return np.asarray(np.add.reduceat(values, starts, axis) / counts.reshape(shape))


@cache
def _cosines() -> npt.NDArray[np.float64]:
    """The cosine transform of 32 values, (32, 32)."""
    waves, places = np.arange(_SIDE)[:, None], np.arange(_SIDE)
    return np.asarray(np.cos(np.pi / _SIDE * (places + 0.5) * waves))


@cache
def _permutations() -> tuple[Hashes, Hashes]:
    random = np.random.Generator(np.random.PCG64(_SEED))
    factors = random.integers(0, 1 << 63, _NUMBERS, np.uint64) * np.uint64(2) + np.uint64(1)
    return factors, random.integers(0, 1 << 63, _NUMBERS, np.uint64) * np.uint64(2)
