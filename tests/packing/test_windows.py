import math

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from tests.packing.helpers import blended
from vlmdata.packing import Blend, SampleTable
from vlmdata.packing.plan.blend import epoch_passes
from vlmdata.packing.plan.windows import make_windows

SHARD = 7


@given(st.integers(1, 7), st.sampled_from([(1.0, 1.0), (2.5, 0.5), (1.0, 3.0)]), st.integers(0, 4))
def test_windows_hold_every_use_once(window: int, weights: tuple[float, float], epoch: int) -> None:
    table = blended(43, 28, shard_size=5)
    passes = epoch_passes(table, Blend("epochs", weights), 0, epoch)
    windows = make_windows(table, passes, window, 0, epoch)
    expected = sorted((s, r) for p in passes for s, r in zip(p.samples.tolist(), p.repeats.tolist(), strict=True))
    assert sorted(zip(windows.samples.tolist(), windows.repeats.tolist(), strict=True)) == expected
    assert windows.offsets[0] == 0
    assert windows.offsets[-1] == len(expected)
    assert (np.diff(windows.offsets) > 0).all()


@given(st.integers(1, 12), st.integers(0, 5))
def test_a_window_is_that_many_whole_shards(window: int, epoch: int) -> None:
    table = blended(95, shard_size=5)
    windows = make_windows(table, epoch_passes(table, None, 0, epoch), window, 0, epoch)
    seen: set[int] = set()
    for start, stop in zip(windows.offsets, windows.offsets[1:], strict=False):
        shards = set(table.shard[windows.samples[start:stop]].tolist())
        assert len(shards) <= window
        assert not shards & seen, "a shard is visited once"
        seen |= shards
    assert len(windows.offsets) - 1 == -(-19 // window)


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[SampleTable, int, int]:
    """Datasets of 1 to 60 shards of 7 samples, a window and an epoch."""
    shards = draw(st.lists(st.integers(1, 60), min_size=1, max_size=6))
    table = blended(*(SHARD * count for count in shards), shard_size=SHARD)
    return table, draw(st.integers(1, 24)), draw(st.integers(0, 3))


def parts_of(table: SampleTable, window: int, epoch: int) -> list[npt.NDArray[np.int64]]:
    """Table positions, window by window."""
    windows = make_windows(table, epoch_passes(table, None, 0, epoch), window, 0, epoch)
    return np.split(windows.samples, windows.offsets[1:-1])


def shards_of(table: SampleTable) -> list[int]:
    """Shards of each dataset."""
    return (np.bincount(table.dataset) // SHARD).tolist()


@given(mixtures())
def test_every_window_has_its_share_of_each_dataset(case: tuple[SampleTable, int, int]) -> None:
    table, window, epoch = case
    shards = shards_of(table)
    parts = parts_of(table, window, epoch)
    total = -(-sum(shards) // window)
    small = sorted((count, dataset) for dataset, count in enumerate(shards) if count < total)
    split = {dataset for _, dataset in small[: window // 4]}
    for dataset, count in enumerate(shards):
        held = [int((table.dataset[part] == dataset).sum()) for part in parts]
        unit = 1 if dataset in split else SHARD
        if dataset in split or count >= total:
            share = SHARD * count / total / unit
            assert {samples / unit for samples in held} <= {math.floor(share), math.ceil(share)}
        of_shard = [set(table.shard[part[table.dataset[part] == dataset]].tolist()) for part in parts]
        for shard in range(count):
            where = [number for number, held_here in enumerate(of_shard) if shard in held_here]
            assert len(where) == 1 or dataset in split
            assert where[-1] - where[0] <= total / count + 1, "a shard that is cut is wanted for a while only"


@given(mixtures())
def test_a_reader_needs_about_a_windows_shards_at_hand(case: tuple[SampleTable, int, int]) -> None:
    table, window, epoch = case
    for part in parts_of(table, window, epoch):
        held = set(zip(table.dataset[part].tolist(), table.shard[part].tolist(), strict=True))
        assert len(held) <= window + table.num_datasets + window // 4


def test_shards_of_many_small_datasets_are_spread_evenly() -> None:
    table = blended(*[SHARD] * 40, *[10 * SHARD] * 16, shard_size=SHARD)
    parts = parts_of(table, 10, 0)
    assert len(parts) == 20
    split = {0, 1}  # a quarter of the window
    for part in parts:
        whole = part[~np.isin(table.dataset[part], list(split))]
        assert len(whole) in (9 * SHARD, 10 * SHARD)


def test_a_single_shard_comes_early_in_some_epochs_and_late_in_others() -> None:
    table = blended(100 * SHARD, SHARD, shard_size=SHARD)  # window 3: too small to cut shards
    found = []
    for epoch in range(100):
        where = [number for number, part in enumerate(parts_of(table, 3, epoch)) if (table.dataset[part] == 1).any()]
        assert len(where) == 1
        found += where
    assert len(set(found)) > 25  # of 34 windows
    assert 10 < np.mean(found) < 24


def test_windows_are_pinned() -> None:
    # If this changes on purpose, raise WINDOWS_VERSION, so that resumes are refused and not silently different.
    table = blended(1000, 10, 30, 200, shard_size=10)
    windows = make_windows(table, epoch_passes(table, Blend("epochs", (1, 1, 2, 0.5)), 0, 1), 4, 0, 1)
    weights = np.arange(1, len(windows.samples) + 1)
    assert len(windows.offsets) == 31
    assert (int((windows.samples * weights).sum()), int((windows.offsets * np.arange(31)).sum())) == (399086698, 372025)


def test_proportional_datasets_have_the_same_share_in_every_window() -> None:
    table = blended(4000, 1000, shard_size=10)
    parts = parts_of(table, 25, 0)
    assert len(parts) == 20
    assert {float((table.dataset[part] == 1).mean()) for part in parts} == {0.2}


def test_epochs_visit_shards_in_another_order() -> None:
    table = blended(100, shard_size=5)
    orders = []
    for epoch in (0, 0, 1):
        windows = make_windows(table, epoch_passes(table, None, 0, epoch), 1, 0, epoch)
        orders.append(table.shard[windows.samples].tolist())
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert orders[0] != sorted(orders[0])


def test_passes_follow_one_another() -> None:
    table = blended(50, shard_size=5)
    windows = make_windows(table, epoch_passes(table, Blend("epochs", (2,)), 0, 0), 5, 0, 0)
    assert windows.repeats.tolist() == [0] * 50 + [1] * 50


def test_no_window_is_one_window() -> None:
    table = blended(9, 4)
    windows = make_windows(table, epoch_passes(table, None, 0, 0), None, 0, 0)
    assert windows.offsets.tolist() == [0, 13]
    assert windows.samples.tolist() == list(range(13))
