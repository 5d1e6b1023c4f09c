import numpy as np
import pytest

from tests.packing.helpers import make_table
from vlmdata.packing import SampleTable, concatenate_tables, table_from_columns


def test_columns_become_sums_over_each_samples_images() -> None:
    # Text; two images; a video of 3 temporal patches: attention runs within each.
    grids = [[1, 2, 4], [1, 4, 4], [3, 2, 2]]
    table = table_from_columns([5, 60, 70], [1, 2, 3], grids, [0, 0, 2, 3], [0, 0, 1])
    assert table.num_targets.tolist() == [1, 2, 3]
    assert table.num_patches.tolist() == [0, 24, 12]
    assert table.sum_patches_squared.tolist() == [0, 8**2 + 16**2, 3 * 4**2]
    assert table.dataset.tolist() == [0, 0, 0]


def test_text_only_tables_need_no_grids() -> None:
    assert table_from_columns([1, 2], [0, 0], np.zeros((0, 3)), [0, 0, 0], [0, 0]).num_patches.tolist() == [0, 0]


def test_concatenation_numbers_datasets() -> None:
    table = concatenate_tables([make_table([1, 2]), make_table([3]), make_table([4, 5, 6])])
    assert table.dataset.tolist() == [0, 0, 1, 2, 2, 2]
    assert table.dataset_offsets().tolist() == [0, 2, 3, 6]
    assert concatenate_tables([table, make_table([9])]).num_datasets == 4


def columns(**changes: object) -> SampleTable:
    base = {
        "lengths": np.array([3, 4], np.int32),
        "num_targets": np.zeros(2, np.int32),
        "num_patches": np.zeros(2, np.int32),
        "sum_patches_squared": np.zeros(2, np.int64),
        "shard": np.zeros(2, np.int32),
        "dataset": np.zeros(2, np.int32),
    }
    return SampleTable(**{**base, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shard": np.zeros(3, np.int32)}, r"shard has shape \(3,\)"),
        ({"lengths": np.array([3, 0], np.int32)}, "sample 1 has length 0"),
        ({"num_patches": np.array([3, -1], np.int32)}, "num_patches has the value -1; counts must not be negative"),
        ({"num_targets": np.array([-2, 0], np.int32)}, "num_targets has the value -2"),
        ({"shard": np.array([1, 0], np.int32)}, "shard order"),
        ({"dataset": np.array([1, 1], np.int32)}, "numbered 0, 1, 2"),
        ({"dataset": np.array([0, 2], np.int32)}, "numbered 0, 1, 2"),
    ],
)
def test_bad_columns_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        columns(**changes)


def test_shards_start_over_with_each_dataset() -> None:
    columns(shard=np.array([1, 0], np.int32), dataset=np.array([0, 1], np.int32))


def test_empty_datasets_are_refused() -> None:
    with pytest.raises(ValueError, match=r"none empty, got lengths \[1, 0\]"):
        concatenate_tables([make_table([1]), make_table([])])
    with pytest.raises(ValueError, match="grid_offsets has 2 entries"):
        table_from_columns([1, 2], [0, 0], np.zeros((0, 3)), [0, 0], [0, 0])
