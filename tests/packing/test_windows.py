import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.packing.helpers import blended
from vlmdata.packing import Blend
from vlmdata.packing.blend import epoch_passes
from vlmdata.packing.windows import make_windows


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


def test_every_window_has_the_blend_of_the_epoch() -> None:
    table = blended(4000, 1000, shard_size=10)
    windows = make_windows(table, epoch_passes(table, None, 0, 0), 25, 0, 0)
    assert len(windows.offsets) == 21
    for start, stop in zip(windows.offsets, windows.offsets[1:], strict=False):
        assert (table.dataset[windows.samples[start:stop]] == 1).mean() == 0.2


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
