"""Windows over shards: which uses of samples are packed and shuffled together.

A pass visits each shard once, in an order drawn anew for every epoch. The visits of all datasets are dealt to windows
in proportion, so that every window has nearly the blend of the epoch, and about ``shuffle_window`` visits. Storage is
then read window after window, and a reader needs no more than a window's shards at hand.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vlmdata.packing.blend import Pass
from vlmdata.packing.seeding import derive_key, permutation
from vlmdata.packing.table import SampleTable

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True)
class Windows:
    """An epoch's uses of samples, grouped in windows.

    Attributes:
        samples: int64 (m,), table positions.
        repeats: int32 (m,), see :class:`vlmdata.packing.blend.Pass`.
        offsets: int64 (W + 1,), window w holds ``[offsets[w], offsets[w + 1])``.
    """

    samples: IntArray
    repeats: npt.NDArray[np.int32]
    offsets: IntArray


def make_windows(table: SampleTable, passes: list[Pass], shuffle_window: int | None, seed: int, epoch: int) -> Windows:
    """Group an epoch's uses in windows.

    Args:
        table: The samples.
        passes: The epoch's passes (see :func:`vlmdata.packing.blend.epoch_passes`), at least one.
        shuffle_window: Shard visits per window, or None for a single window.
        seed: The plan's seed.
        epoch: The epoch; another epoch visits shards in another order.

    Returns:
        The windows, none empty.
    """
    samples = np.concatenate([p.samples for p in passes]) if len(passes) > 1 else passes[0].samples
    repeats = np.concatenate([p.repeats for p in passes]) if len(passes) > 1 else passes[0].repeats
    if shuffle_window is None:
        return Windows(samples, repeats, np.array([0, len(samples)]))
    visit_of_use, dataset_of_visit = _visits(table, passes)
    num_visits = len(dataset_of_visit)
    num_windows = -(-num_visits // shuffle_window)
    window_of_visit = np.empty(num_visits, np.int64)
    for dataset in np.unique(dataset_of_visit):
        visits = np.flatnonzero(dataset_of_visit == dataset)
        order = _visit_order(table, passes, int(dataset), derive_key("visits", seed, epoch, int(dataset)))
        # Visit j of J goes to window floor(j W / J): all datasets advance through the epoch at one pace.
        window_of_visit[visits[order]] = np.arange(len(visits)) * num_windows // len(visits)
    window = window_of_visit[visit_of_use]
    uses = np.argsort(window, kind="stable")
    offsets = np.searchsorted(window[uses], np.arange(num_windows + 1))
    return Windows(samples[uses], repeats[uses], np.unique(offsets))


def _visits(table: SampleTable, passes: list[Pass]) -> tuple[IntArray, IntArray]:
    """Number the (pass, shard) visits: int64 (m,) the visit of each use, int64 (V,) the dataset of each visit."""
    visit_of_use, datasets = [], []
    count = 0
    for one in passes:
        shard = table.shard[one.samples]  # non-decreasing, since samples are in table order
        starts = np.concatenate([[True], shard[1:] != shard[:-1]])
        visit_of_use.append(np.cumsum(starts) - 1 + count)
        visits = int(starts.sum())
        datasets.append(np.full(visits, one.dataset, np.int64))
        count += visits
    return np.concatenate(visit_of_use), np.concatenate(datasets)


def _visit_order(table: SampleTable, passes: list[Pass], dataset: int, key: int) -> IntArray:
    """Order of a dataset's visits: pass after pass, the shards of each permuted."""
    order = []
    count = 0
    for number, one in enumerate(p for p in passes if p.dataset == dataset):
        visits = len(np.unique(table.shard[one.samples]))
        order.append(permutation(visits, derive_key("pass", key, number)) + count)
        count += visits
    return np.concatenate(order)
