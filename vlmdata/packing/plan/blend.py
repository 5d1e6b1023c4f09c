"""Blends datasets: determines which samples an epoch contains, and how often.

Each dataset is an endless stream of passes in one fixed seeded order (shards permuted, samples permuted within a
shard). An epoch takes q samples from it, where q is a fixed exact number, not necessarily whole: epoch e takes the
stream's positions from floor(e q) to floor((e + 1) q). So over any run of epochs, all samples are used equally often,
to within one use; 2.5 passes give two full ones and alternating halves. The pass number of a use is its ``repeat``: how
often this sample was used before in the whole training.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from vlmdata.errors import UsageError
from vlmdata.packing.arrays import IntArray
from vlmdata.packing.config import Blend
from vlmdata.packing.seeding import derive_key, grouped_permutation, permutation
from vlmdata.packing.table import SampleTable
from vlmdata.wording import counted


@dataclass(frozen=True, eq=False, slots=True)
class DatasetPass:
    """One pass of an epoch over (part of) a dataset."""

    dataset: int  # dataset number
    samples: IntArray  # int64 (m,), table positions, increasing
    repeats: npt.NDArray[np.int32]  # int32 (m,), earlier uses of each sample, in all epochs and passes


@dataclass(frozen=True, slots=True)
class DatasetShare:
    """Contribution of a dataset to an epoch."""

    samples: int  # number of uses of its samples
    tokens: int  # true tokens of these uses
    passes: float  # samples divided by the dataset's size
    sample_share: float  # of the epoch's samples
    token_share: float  # of the epoch's tokens


def passes_per_epoch(table: SampleTable, blend: Blend | None) -> tuple[Fraction, ...]:
    """Returns the number of passes over each dataset in an epoch, as exact numbers.

    A blend of None means one pass each. With "tokens" or "samples", passes are scaled so that the epoch has as many
    tokens (or samples) as one pass over all datasets; weights proportional to sizes give one pass each.

    Raises:
        UsageError: If the number of weights differs from the number of datasets.
    """
    if blend is None:
        return (Fraction(1),) * table.num_datasets
    weights = blend.fractions()
    if len(weights) != table.num_datasets:
        raise UsageError(
            f"blend has {counted(len(weights), 'weight')} for {counted(table.num_datasets, 'dataset')}; give one each"
        )
    if blend.by == "epochs":
        return weights
    offsets = table.dataset_offsets()
    if blend.by == "samples":
        mass = np.diff(offsets)
    else:
        mass = np.array([table.lengths[a:b].sum(dtype=np.int64) for a, b in pairwise(offsets)])
    scale = Fraction(int(mass.sum())) / sum(weights)
    return tuple(scale * weight / int(part) for weight, part in zip(weights, mass, strict=True))


def epoch_passes(table: SampleTable, blend: Blend | None, seed: int, epoch: int) -> list[DatasetPass]:
    """Returns the uses of samples in an epoch, as passes in the order of datasets.

    The seed determines the order of partial passes. Each use of a sample is in a separate pass, with consecutive
    repeats.
    """
    offsets = table.dataset_offsets()
    result = []
    for dataset, quota in enumerate(passes_per_epoch(table, blend)):
        first, size = int(offsets[dataset]), int(offsets[dataset + 1] - offsets[dataset])
        start, stop = (epoch * quota * size).__floor__(), ((epoch + 1) * quota * size).__floor__()
        if start == stop:
            continue
        whole, part = divmod(stop - start, size)
        done, at = divmod(start, size)
        # Samples before `at` in the rotation have been used done + 1 times.
        used = np.full(size, done, np.int32)
        extra = np.zeros(0, np.int64)
        if at or part:
            rotation = _rotation(table.shard[first : first + size], derive_key("rotation", seed, dataset))
            used[rotation[:at]] += 1
            extra = np.sort(rotation[np.arange(at, at + part) % size])
        everything = np.arange(first, first + size)
        result += [DatasetPass(dataset, everything, used + np.int32(number)) for number in range(whole)]
        if part:
            result.append(DatasetPass(dataset, first + extra, used[extra] + np.int32(whole)))
    return result


def realised_shares(table: SampleTable, samples: npt.NDArray[np.integer]) -> tuple[DatasetShare, ...]:
    """Returns the actual contribution of each dataset to an epoch, whose uses are table positions (m,)."""
    sizes = np.diff(table.dataset_offsets())
    dataset = table.dataset[samples]
    uses = np.bincount(dataset, minlength=len(sizes))
    # bincount's weights are float64, exact up to 2**53 tokens.
    tokens = np.bincount(dataset, weights=table.lengths[samples], minlength=len(sizes)).astype(np.int64)
    all_uses, all_tokens = max(1, int(uses.sum())), max(1, int(tokens.sum()))
    return tuple(
        DatasetShare(u, t, u / max(1, s), u / all_uses, t / all_tokens)
        for u, t, s in zip(uses.tolist(), tokens.tolist(), sizes.tolist(), strict=True)
    )


def _rotation(shard: npt.NDArray[np.int32], key: int) -> IntArray:
    """Returns the order of a dataset's samples. Shards are permuted, so that a partial pass reads few of them."""
    distinct, index = np.unique(shard, return_inverse=True)
    rank = np.empty(len(distinct), np.int64)
    rank[permutation(len(distinct), derive_key("shards", key))] = np.arange(len(distinct))
    return grouped_permutation(rank[index], len(distinct), derive_key("samples", key))
