"""The planner's view of the samples: the numbers on which a plan depends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vlmdata.packing.arrays import IntArray, offsets_of


@dataclass(frozen=True, eq=False, slots=True)
class SampleTable:
    """Planning data of n samples: datasets one after another, each in storage order.

    Attributes:
        lengths: int32 (n,), true token lengths (unpadded), at least 1.
        num_targets: int32 (n,), target tokens.
        num_patches: int32 (n,), vision patches over all images of the sample; 0 for text.
        sum_patches_squared: int64 (n,), sum over the sample's vision attention spans of (patches in the span) squared.
            A span is an image, or one temporal patch of a video.
        shard: int32 (n,), shard number within its dataset, non-decreasing within a dataset.
        dataset: int32 (n,), dataset number: 0, 1, 2, … without gaps.
    """

    lengths: npt.NDArray[np.int32]
    num_targets: npt.NDArray[np.int32]
    num_patches: npt.NDArray[np.int32]
    sum_patches_squared: IntArray
    shard: npt.NDArray[np.int32]
    dataset: npt.NDArray[np.int32]

    def __post_init__(self) -> None:
        n = len(self.lengths)
        for name in self.__slots__:
            column = getattr(self, name)
            if column.shape != (n,):
                raise ValueError(f"column {name} has shape {column.shape}, lengths has ({n},)")
        if n == 0:
            return
        if n >= 1 << 31:
            raise ValueError(f"{n} samples; plans store sample numbers in 31 bits")
        if self.lengths.min() < 1:
            at = int(np.argmin(self.lengths))
            raise ValueError(f"sample {at} has length {self.lengths[at]}; every sample needs at least 1 token")
        for name in ("num_targets", "num_patches", "sum_patches_squared"):
            if getattr(self, name).min() < 0:
                raise ValueError(f"{name} has the value {getattr(self, name).min()}; counts must not be negative")
        step = np.diff(self.dataset)
        if self.dataset[0] != 0 or ((step != 0) & (step != 1)).any():
            raise ValueError("datasets must be numbered 0, 1, 2, … and be consecutive")
        if ((np.diff(self.shard) < 0) & (step == 0)).any():
            raise ValueError("samples must be in shard order within each dataset")

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_datasets(self) -> int:
        """Number of datasets."""
        return int(self.dataset[-1]) + 1 if len(self) else 0

    def dataset_offsets(self) -> IntArray:
        """int64 (datasets + 1,): samples of dataset d are ``[offsets[d], offsets[d + 1])``."""
        # Use the column's own dtype: searching for another one would convert the whole column.
        numbers = np.arange(self.num_datasets + 1, dtype=self.dataset.dtype)
        return np.searchsorted(self.dataset, numbers).astype(np.int64)


def table_from_columns(
    lengths: npt.ArrayLike,
    num_targets: npt.ArrayLike,
    grids: npt.ArrayLike,
    grid_offsets: npt.ArrayLike,
    shard: npt.ArrayLike,
) -> SampleTable:
    """Builds the table of one dataset from index columns.

    Args:
        lengths: (n,) integers, true token lengths.
        num_targets: (n,) integers, target tokens.
        grids: (G, 3) integers, ``(t, h, w)`` of every image in sample order, in patches.
        grid_offsets: (n + 1,) integers; the images of sample i are ``grids[offsets[i]:offsets[i + 1]]``.
        shard: (n,) integers, non-decreasing shard numbers.

    Returns:
        The table, all samples in dataset 0.

    Raises:
        ValueError: If columns differ in length or order.
    """
    grid = np.asarray(grids, dtype=np.int64).reshape(-1, 3)
    offsets = np.asarray(grid_offsets, dtype=np.int64)
    true_lengths = np.asarray(lengths, dtype=np.int32)
    if len(offsets) != len(true_lengths) + 1 or offsets[-1] != len(grid):
        raise ValueError(
            f"grid_offsets has {len(offsets)} entries ending at {offsets[-1]}, expected {len(true_lengths) + 1} ending "
            f"at {len(grid)}"
        )
    # Vision attention is within one temporal patch: t spans of h * w patches each.
    span = grid[:, 1] * grid[:, 2]
    patches = _segment_sums(grid[:, 0] * span, offsets)
    squares = _segment_sums(grid[:, 0] * span * span, offsets)
    return SampleTable(
        lengths=true_lengths,
        num_targets=np.asarray(num_targets, dtype=np.int32),
        num_patches=patches.astype(np.int32),
        sum_patches_squared=squares,
        shard=np.asarray(shard, dtype=np.int32),
        dataset=np.zeros(len(true_lengths), np.int32),
    )


def concatenate_tables(tables: Sequence[SampleTable]) -> SampleTable:
    """Concatenates tables. The datasets of table k are numbered after those of earlier tables.

    Raises:
        ValueError: If there is no table or one is empty: an empty dataset would have no number.
    """
    if not tables or not all(len(table) for table in tables):
        raise ValueError(f"need at least one table and none empty, got lengths {[len(t) for t in tables]}")
    first = np.cumsum([0] + [table.num_datasets for table in tables])
    return SampleTable(
        lengths=np.concatenate([t.lengths for t in tables]),
        num_targets=np.concatenate([t.num_targets for t in tables]),
        num_patches=np.concatenate([t.num_patches for t in tables]),
        sum_patches_squared=np.concatenate([t.sum_patches_squared for t in tables]),
        shard=np.concatenate([t.shard for t in tables]),
        dataset=np.concatenate([t.dataset + np.int32(k) for t, k in zip(tables, first, strict=False)]),
    )


def _segment_sums(values: IntArray, offsets: IntArray) -> IntArray:
    """Sums ``values`` over each ``[offsets[i], offsets[i + 1])``. Empty segments give 0 (unlike with reduceat)."""
    running = offsets_of(values)
    return running[offsets[1:]] - running[offsets[:-1]]
