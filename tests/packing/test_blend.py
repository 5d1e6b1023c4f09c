from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.packing.helpers import blended
from vlmdata.packing import Blend, SampleTable, passes_per_epoch, realised_shares
from vlmdata.packing.plan.blend import epoch_passes

quotas = st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0, 1.3, 2.5, 3.0]), min_size=2, max_size=2).filter(any)


def uses(table: SampleTable, blend: Blend | None, epoch: int, seed: int = 0) -> Counter[tuple[int, int]]:
    found: Counter[tuple[int, int]] = Counter()
    for one in epoch_passes(table, blend, seed, epoch):
        assert (np.diff(one.samples) > 0).all()
        assert (table.dataset[one.samples] == one.dataset).all()
        found.update(zip(one.samples.tolist(), one.repeats.tolist(), strict=True))
    return found


def test_without_a_blend_an_epoch_is_one_pass() -> None:
    table = blended(7, 5)
    for epoch in range(3):
        assert uses(table, None, epoch) == Counter({(sample, epoch): 1 for sample in range(12)})


@given(quotas, st.integers(1, 9), st.integers(0, 5), st.integers(0, 9))
def test_nothing_is_starved(weights: list[float], epochs: int, start: int, seed: int) -> None:
    table = blended(13, 8)
    blend = Blend("epochs", tuple(weights))
    counts = Counter()
    for epoch in range(start, start + epochs):
        for (sample, _), count in uses(table, blend, epoch, seed).items():
            assert count == 1, "a use is unique"
            counts[sample] += 1
    for dataset, weight in enumerate(weights):
        expected = Fraction(str(weight)) * epochs
        for sample in np.flatnonzero(table.dataset == dataset).tolist():
            assert abs(counts[sample] - expected) <= 1


@given(quotas, st.integers(0, 9))
def test_repeat_counts_all_earlier_uses(weights: list[float], seed: int) -> None:
    table = blended(6, 5)
    seen: Counter[int] = Counter()
    for epoch in range(6):
        by_sample: dict[int, list[int]] = {}
        for sample, repeat in uses(table, Blend("epochs", tuple(weights)), epoch, seed):
            by_sample.setdefault(sample, []).append(repeat)
        for sample, repeats in by_sample.items():
            assert sorted(repeats) == list(range(seen[sample], seen[sample] + len(repeats)))
            seen[sample] += len(repeats)


def test_half_passes_alternate() -> None:
    table = blended(200, 1)
    blend = Blend("epochs", (0.5, 1))
    halves = [{sample for sample, _ in uses(table, blend, epoch) if sample < 200} for epoch in range(4)]
    assert halves[0] | halves[1] == set(range(200))
    assert halves[0] == halves[2]
    assert len(halves[0]) == len(halves[1]) == 100
    other = {sample for sample, _ in uses(table, blend, 0, seed=1) if sample < 200}
    assert other != halves[0]


def test_part_of_a_pass_touches_few_shards() -> None:
    table = blended(1000, 1, shard_size=10)
    part = [sample for sample, _ in uses(table, Blend("epochs", (0.2, 1)), 0) if sample < 1000]
    assert len(part) == 200
    assert len(set(table.shard[part].tolist())) == 20


@settings(max_examples=40)
@given(st.sampled_from(["tokens", "samples"]), st.lists(st.integers(1, 9), min_size=3, max_size=3))
def test_weights_are_realised(by: str, weights: list[int]) -> None:
    table = blended(400, 300, 200, seed=1)
    blend = Blend(by, tuple(weights))  # type: ignore[arg-type]
    samples = np.concatenate([p.samples for e in range(3) for p in epoch_passes(table, blend, 0, e)])
    shares = realised_shares(table, samples)
    for share, weight in zip(shares, weights, strict=True):
        got = share.token_share if by == "tokens" else share.sample_share
        assert got == pytest.approx(weight / sum(weights), abs=0.02)
        assert share.passes == pytest.approx(share.samples / {0: 400, 1: 300, 2: 200}[shares.index(share)])
    # Such an epoch is as long as one pass over everything.
    mass = sum(s.tokens for s in shares) / table.lengths.sum() if by == "tokens" else len(samples) / 900
    assert mass == pytest.approx(3, rel=0.02)


def test_weights_in_proportion_to_size_give_one_pass_each() -> None:
    table = blended(30, 70)
    assert passes_per_epoch(table, Blend("samples", (30, 70))) == (1, 1)
    tokens = [float(table.lengths[table.dataset == d].sum()) for d in (0, 1)]
    assert passes_per_epoch(table, Blend("tokens", tuple(tokens))) == (1, 1)


def test_wrong_number_of_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="3 weights for 2 datasets"):
        passes_per_epoch(blended(3, 3), Blend("epochs", (1, 1, 1)))
