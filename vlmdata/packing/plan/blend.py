"""Blends datasets: determines which samples an epoch contains, and how often.

Each dataset is an endless stream of passes in one fixed seeded order (shards permuted, samples permuted within a
shard). An epoch takes q samples from it, where q is a fixed exact number, not necessarily whole: epoch e takes the
stream's positions from floor(e q) to floor((e + 1) q). So over any run of epochs, all samples are used equally often,
to within one use; 2.5 passes give two full ones and alternating halves. The pass number of a use is its ``repeat``: how
often this sample was used before in the whole training.

If the settings of a run changed, its samples begin with unequal numbers of uses. The stream then first completes the
passes that had begun: those with the fewest uses come before all others.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
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
    targets: int  # target tokens of these uses
    target_share: float  # of the epoch's target tokens


def usable_samples(table: SampleTable, blend: Blend | None) -> list[IntArray]:
    """Returns the samples of each dataset that a blend may use: table positions, int64, increasing.

    A dataset's ``max_samples`` are always the same ones, and lie in few shards.

    Raises:
        UsageError: If the number of weights differs from the number of datasets.
    """
    if blend is not None and len(blend.weights) != table.num_datasets:
        raise UsageError(
            f"blend has {counted(len(blend.weights), 'weight')} for {counted(table.num_datasets, 'dataset')}; give one "
            "each"
        )
    found = []
    for dataset, (first, stop) in enumerate(pairwise(table.dataset_offsets().tolist())):
        samples = np.arange(first, stop)
        most = blend.max_samples[dataset] if blend is not None and blend.max_samples else None
        if most is not None and most < len(samples):
            order = _rotation(table.shard[samples], derive_key("max_samples", len(samples)))
            samples = np.sort(samples[order[:most]])
        if blend is not None and blend.max_length is not None:
            samples = samples[table.lengths[samples] <= blend.max_length]
        found.append(samples)
    return found


def passes_per_epoch(table: SampleTable, blend: Blend | None) -> tuple[Fraction, ...]:
    """Returns the number of passes over the usable samples of each dataset in an epoch, as exact numbers.

    A blend of None means one pass each. With "tokens", "samples" or "targets", passes are scaled so that the epoch has
    as many of them as one pass over all datasets; weights proportional to sizes give one pass each.

    Raises:
        UsageError: If the number of weights differs from the number of datasets, or a dataset with a weight has nothing
            to use.
    """
    if blend is None:
        return (Fraction(1),) * table.num_datasets
    weights, mass = blend.fractions(), blend_mass(table, blend)
    for dataset, (weight, part) in enumerate(zip(weights, mass, strict=True)):
        if weight and not part:
            limit = "" if blend.max_length is None else f" in samples of at most {blend.max_length} tokens (max_length)"
            unit = "samples" if blend.by == "epochs" else blend.by
            raise UsageError(f"dataset {dataset} has weight {float(weight):g}, but no {unit}{limit}; give it weight 0")
    if blend.by == "epochs":
        return weights
    scale = Fraction(sum(mass)) / sum(weights)
    return tuple(scale * weight / max(1, part) for weight, part in zip(weights, mass, strict=True))


def blend_mass(table: SampleTable, blend: Blend) -> list[int]:
    """Returns the size of the usable samples of each dataset, in the unit of the blend (samples for "epochs")."""
    columns = {"tokens": table.lengths, "targets": table.num_targets}
    usable = usable_samples(table, blend)
    if blend.by in columns:
        return [int(columns[blend.by][samples].sum(dtype=np.int64)) for samples in usable]
    return [len(samples) for samples in usable]


def uses_per_epoch(table: SampleTable, blend: Blend | None) -> tuple[Fraction, ...]:
    """Returns how many uses of samples of each dataset an epoch has on average, as exact numbers.

    Raises:
        UsageError: See :func:`passes_per_epoch`.
    """
    passes = passes_per_epoch(table, blend)
    return tuple(each * len(samples) for each, samples in zip(passes, usable_samples(table, blend), strict=True))


def epoch_passes(
    table: SampleTable, blend: Blend | None, seed: int, epoch: int, used: npt.NDArray[np.int32] | None = None
) -> list[DatasetPass]:
    """Returns the uses of samples in an epoch, as passes in the order of datasets.

    The seed determines the order of partial passes. Each use of a sample is in a separate pass, with consecutive
    repeats.

    Args:
        table: The samples.
        blend: The mixture.
        seed: The seed.
        epoch: The epoch, counted from the first with this blend and seed.
        used: int32 (n,), uses of each sample before that one; None means none.
    """
    result = []
    uses = uses_per_epoch(table, blend)
    for dataset, samples in enumerate(usable_samples(table, blend)):
        start, stop = (epoch * uses[dataset]).__floor__(), ((epoch + 1) * uses[dataset]).__floor__()
        if start == stop:
            continue
        stream = _Stream(table, samples, used, derive_key("rotation", seed, dataset))
        before = stream.uses(start)
        taken = stream.uses(stop) - before
        whole = int(taken.min())
        result += [DatasetPass(dataset, samples, before + np.int32(number)) for number in range(whole)]
        for number in range(whole, int(taken.max())):
            chosen = np.flatnonzero(taken > number)
            result.append(DatasetPass(dataset, samples[chosen], before[chosen] + np.int32(number)))
    return result


def uses_at(
    table: SampleTable, blend: Blend | None, seed: int, epoch: int, used: npt.NDArray[np.int32] | None = None
) -> npt.NDArray[np.int32]:
    """Returns the uses of each sample before an epoch, int32 (n,). Arguments as of :func:`epoch_passes`."""
    found = np.zeros(len(table), np.int32) if used is None else used.copy()
    uses = uses_per_epoch(table, blend)
    for dataset, samples in enumerate(usable_samples(table, blend)):
        if len(samples):
            stream = _Stream(table, samples, used, derive_key("rotation", seed, dataset))
            found[samples] = stream.uses((epoch * uses[dataset]).__floor__())
    return found


class _Stream:
    """The endless stream of a dataset's samples: at least one of them, with their earlier uses."""

    def __init__(self, table: SampleTable, samples: IntArray, used: npt.NDArray[np.int32] | None, key: int):
        self._used = np.zeros(len(samples), np.int32) if used is None else used[samples]
        self._shard, self._key = table.shard[samples], key

    @cached_property
    def _order(self) -> IntArray:
        return _rotation(self._shard, self._key)

    def uses(self, position: int) -> npt.NDArray[np.int32]:
        """Returns the uses of each sample after so many uses of the stream, int32 (k,)."""
        least = int(self._used.min())
        # Samples of at most `least + i` uses: each of them is used once before any is used more often.
        behind = np.cumsum(np.bincount(self._used - least))[:-1]
        ends = np.cumsum(behind)
        level = int(np.searchsorted(ends, position, side="right"))
        position -= int(ends[level - 1]) if level else 0
        if level < len(behind):
            counts = np.maximum(self._used, np.int32(least + level))
            if position:
                order = self._order
                counts[order[self._used[order] <= least + level][:position]] += 1
            return counts
        done, position = divmod(position, len(self._used))
        counts = np.full(len(self._used), least + level + done, np.int32)
        if position:
            counts[self._order[:position]] += 1
        return counts


def realised_shares(table: SampleTable, samples: npt.NDArray[np.integer]) -> tuple[DatasetShare, ...]:
    """Returns the actual contribution of each dataset to an epoch, whose uses are table positions (m,)."""
    sizes = np.diff(table.dataset_offsets())
    dataset = table.dataset[samples]
    uses = np.bincount(dataset, minlength=len(sizes))
    # bincount's weights are float64, exact up to 2**53 tokens.
    tokens, targets = (
        np.bincount(dataset, weights=column[samples], minlength=len(sizes)).astype(np.int64)
        for column in (table.lengths, table.num_targets)
    )
    totals = [max(1, int(each.sum())) for each in (uses, tokens, targets)]
    return tuple(
        DatasetShare(u, t, u / max(1, size), u / totals[0], t / totals[1], g, g / totals[2])
        for u, t, g, size in zip(uses.tolist(), tokens.tolist(), targets.tolist(), sizes.tolist(), strict=True)
    )


def _rotation(shard: npt.NDArray[np.int32], key: int) -> IntArray:
    """Returns the order of a dataset's samples. Shards are permuted, so that a partial pass reads few of them."""
    distinct, index = np.unique(shard, return_inverse=True)
    rank = np.empty(len(distinct), np.int64)
    rank[permutation(len(distinct), derive_key("shards", key))] = np.arange(len(distinct))
    return grouped_permutation(rank[index], len(distinct), derive_key("samples", key))
