"""Windows over shards: groups of sample uses that are packed and shuffled together.

A pass visits each shard once, in an order drawn per epoch. The visits of each dataset are spread evenly over the
windows, from a phase drawn per dataset and epoch. So a window has about ``shuffle_window`` visits and, of each dataset,
its share of the epoch to within one visit. A dataset with fewer visits than windows would be missing from most of them.
So a few such datasets are spread sample by sample, and are in every window. Storage is read window by window, and a
reader needs only the shards of one window at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vlmdata.packing.arrays import IntArray
from vlmdata.packing.plan.blend import DatasetPass
from vlmdata.packing.seeding import derive_key, grouped_permutation, permutation
from vlmdata.packing.table import SampleTable


@dataclass(frozen=True, eq=False, slots=True)
class Windows:
    """An epoch's sample uses, grouped in windows."""

    samples: IntArray  # int64 (m,), table positions
    repeats: npt.NDArray[np.int32]  # int32 (m,), see DatasetPass
    offsets: IntArray  # int64 (W + 1,), window w holds [offsets[w], offsets[w + 1])


def make_windows(
    table: SampleTable, passes: list[DatasetPass], shuffle_window: int | None, seed: int, epoch: int
) -> Windows:
    """Groups the uses of an epoch's passes, at least one, in windows, none empty.

    ``shuffle_window`` is the number of shard visits per window; None gives a single window. Other epochs visit shards
    in another order.
    """
    samples = np.concatenate([p.samples for p in passes]) if len(passes) > 1 else passes[0].samples
    repeats = np.concatenate([p.repeats for p in passes]) if len(passes) > 1 else passes[0].repeats
    if shuffle_window is None:
        return Windows(samples, repeats, np.array([0, len(samples)]))
    window, num_windows = _window_of_uses(table, passes, shuffle_window, seed, epoch)
    uses = np.argsort(window, kind="stable")
    offsets = np.searchsorted(window[uses], np.arange(num_windows + 1))
    return Windows(samples[uses], repeats[uses], np.unique(offsets))


def _window_of_uses(
    table: SampleTable, passes: list[DatasetPass], shuffle_window: int, seed: int, epoch: int
) -> tuple[IntArray, int]:
    """Assigns an epoch's uses to windows: the window of each use, int64 (m,), and the number of windows."""
    visit_of_use, dataset_of_visit = _visits(table, passes)
    num_visits = len(dataset_of_visit)
    num_windows = -(-num_visits // shuffle_window)
    counts = np.bincount(dataset_of_visit, minlength=table.num_datasets)
    split, few = _small_datasets(counts, num_windows, shuffle_window)
    turn = np.empty(num_visits, np.int64)  # each visit's place in the order of its dataset
    for dataset in np.flatnonzero(counts).tolist():
        order = _visit_order(table, passes, dataset, derive_key("visits", seed, epoch, dataset))
        turn[np.flatnonzero(dataset_of_visit == dataset)[order]] = np.arange(len(order))
    phases = np.array([derive_key("phase", seed, epoch, dataset) % num_windows for dataset in range(len(counts))])
    place = turn * num_windows + phases[dataset_of_visit]
    window_of_visit = place // counts[dataset_of_visit]
    # Whole visits of small datasets are assigned together, in the order of their places. Separately, many small
    # datasets would crowd some windows and leave others out.
    visits = np.flatnonzero(np.isin(dataset_of_visit, few))
    order = np.lexsort((dataset_of_visit[visits], place[visits] / counts[dataset_of_visit[visits]]))
    phase = derive_key("phase", seed, epoch) % num_windows
    window_of_visit[visits[order]] = _spread(len(visits), num_windows, phase)
    window = window_of_visit[visit_of_use]
    bounds = np.searchsorted(dataset_of_visit[visit_of_use], np.arange(len(counts) + 1)).tolist()
    for dataset in split:
        uses = slice(bounds[dataset], bounds[dataset + 1])  # passes are in the order of datasets
        key = derive_key("split", seed, epoch, dataset)
        order = grouped_permutation(turn[visit_of_use[uses]], int(counts[dataset]), key)
        window[uses][order] = _spread(len(order), num_windows, int(phases[dataset]))
    return window, num_windows


def _small_datasets(visits: IntArray, num_windows: int, shuffle_window: int) -> tuple[list[int], list[int]]:
    """Finds the datasets with fewer visits, int64 (D,), than windows, in two lists.

    Those of the first are spread sample by sample. Each of these adds one or two shards to every window of a reader. So
    they are the ones with the fewest visits, which benefit most, and at most a quarter of ``shuffle_window``. The
    visits of the others stay whole.
    """
    small = np.flatnonzero((visits > 0) & (visits < num_windows))
    small = small[np.argsort(visits[small], kind="stable")]
    return small[: shuffle_window // 4].tolist(), small[shuffle_window // 4 :].tolist()


def _spread(count: int, num_windows: int, phase: int) -> IntArray:
    """Spreads items evenly over windows, in order; int64 (count,), non-decreasing. They differ by at most one item.

    A phase in ``[0, num_windows)`` shifts all items by ``phase / num_windows`` of the distance between two. Drawn at
    random, it makes every window equally likely for an item if there are fewer items than windows.
    """
    spread: IntArray = (np.arange(count) * num_windows + phase) // max(1, count)
    return spread


def _visits(table: SampleTable, passes: list[DatasetPass]) -> tuple[IntArray, IntArray]:
    """Numbers the (pass, shard) visits. Returns the visit of each use, int64 (m,), and its dataset, int64 (V,)."""
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


def _visit_order(table: SampleTable, passes: list[DatasetPass], dataset: int, key: int) -> IntArray:
    """Returns the order of a dataset's visits: pass by pass, with permuted shards."""
    order = []
    count = 0
    for number, one in enumerate(p for p in passes if p.dataset == dataset):
        visits = len(np.unique(table.shard[one.samples]))
        order.append(permutation(visits, derive_key("pass", key, number)) + count)
        count += visits
    return np.concatenate(order)
