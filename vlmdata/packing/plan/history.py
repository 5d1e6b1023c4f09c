"""What a run used of each sample before its settings changed.

A run that changes its settings in mid-epoch ends that epoch there and begins a new one. How often each sample was used
until then follows from the earlier settings: from the stream of each dataset up to the epoch of the change, and from
the plan of that epoch up to the step of the change. So a state needs to keep the settings and the position only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from vlmdata.errors import UsageError
from vlmdata.packing.arrays import IntArray
from vlmdata.packing.config import PlanConfig, Stage, first_epoch
from vlmdata.packing.plan.blend import uses_at
from vlmdata.packing.table import SampleTable

type Uses = npt.NDArray[np.int32]
#: Returns the samples of an epoch up to a step: (table, settings, epoch, epochs before these settings, uses, step).
type SamplesUntil = Callable[[SampleTable, PlanConfig, int, int, Uses | None, int], npt.NDArray[np.int32]]


def stage_of(earlier: Sequence[Stage], epoch: int) -> int:
    """Returns the number of the stage to which an epoch belongs; ``len(earlier)`` is the present one."""
    return next((i for i, stage in enumerate(earlier) if (epoch, 0) < (stage.epoch, stage.step)), len(earlier))


def datasets_of(table: SampleTable, datasets: Sequence[int]) -> tuple[SampleTable, IntArray]:
    """Returns the table of some datasets, in this order, and the position of each of its samples in the whole table.

    Raises:
        UsageError: If there is no such dataset.
    """
    if tuple(datasets) == tuple(range(table.num_datasets)):
        return table, np.arange(len(table))
    if max(datasets) >= table.num_datasets:
        raise UsageError(
            f"earlier settings of the run are for dataset {max(datasets)}; there are {table.num_datasets} datasets"
        )
    offsets = table.dataset_offsets()
    positions = np.concatenate([np.arange(offsets[each], offsets[each + 1]) for each in datasets])
    columns = {name: getattr(table, name)[positions] for name in SampleTable.__slots__ if name != "dataset"}
    sizes = np.diff(offsets)[list(datasets)]
    return SampleTable(**columns, dataset=np.repeat(np.arange(len(datasets), dtype=np.int32), sizes)), positions


def used_before(
    table: SampleTable,
    earlier: Sequence[Stage],
    samples_until: SamplesUntil,
    known: tuple[int, Uses | None] = (0, None),
) -> Uses | None:
    """Returns the uses of each sample in earlier stages of a run, int32 (n,); None if there are none.

    ``known`` are the uses in the first stages, and the number of these.
    """
    number, used = known
    for at in range(number, len(earlier)):
        stage, first = earlier[at], first_epoch(earlier[:at])
        part, positions = datasets_of(table, stage.datasets)
        config, before = stage.config, None if used is None else used[positions]
        after = uses_at(part, config.blend, config.seed, stage.epoch - first, before)
        if stage.step:
            samples = samples_until(part, config, stage.epoch, first, before, stage.step)
            after += np.bincount(samples, minlength=len(part)).astype(np.int32)
        used = np.zeros(len(table), np.int32) if used is None else used.copy()
        used[positions] = after
    return used
