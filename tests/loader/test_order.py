"""Which samples come when: a function of data, configuration and position, and of nothing else."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.loader.helpers import Steps, epoch_of, packs_of, sample_names, steps_of, stream
from vlmdata.batch import PackedBatch
from vlmdata.format.dataset import VlmDataset
from vlmdata.loader.state import Position
from vlmdata.packing.config import Blend

#: Of tokens only: order does not depend on what is read.
FAST: dict[str, Any] = {"parts": ()}
EPOCHS = 2


@cache
def uninterrupted(data: Path, seed: int) -> Steps:
    """The samples of every step of two epochs, on one rank, without workers."""
    with stream(data, seed=seed, **FAST) as loader:
        return steps_of(chain.from_iterable(loader for _ in range(EPOCHS)))


def run(data: Path, dp_rank: int, state: Any, count: int | None, **options: Any) -> tuple[list[PackedBatch], Any]:
    """A rank's batches from a state on, so many or to the end of the second epoch; and its state afterwards."""
    with stream(data, dp_rank=dp_rank, **options, **FAST) as loader:
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        batches: list[PackedBatch] = []
        while loader.position.epoch < EPOCHS and len(batches) != count:
            batches += islice(loader, None if count is None else count - len(batches))
        return batches, loader.state_dict()


@given(
    seed=st.sampled_from([0, 7]),
    dp_before=st.sampled_from([1, 2, 4]),
    dp_after=st.sampled_from([1, 2, 4]),
    workers=st.tuples(st.sampled_from([0, 0, 0, 1, 2]), st.sampled_from([0, 0, 0, 1, 2])),
    stop=st.integers(0, 22),
)
@example(seed=0, dp_before=2, dp_after=4, workers=(2, 1), stop=4)
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_step_holds_the_same_samples_however_it_is_split_and_interrupted(
    chat: Path, seed: int, dp_before: int, dp_after: int, workers: tuple[int, int], stop: int
) -> None:
    micro_batches = 4 // dp_before
    stop = min(stop, 5 * micro_batches)
    if stop % micro_batches:
        dp_after = dp_before  # within a step
    before: list[PackedBatch] = []
    after: list[PackedBatch] = []
    states = []
    for rank in range(dp_before):
        batches, state = run(chat, rank, None, stop, dp_size=dp_before, num_workers=workers[0], seed=seed)
        before += batches
        states.append(state)
    assert all(state == states[0] for state in states)
    for rank in range(dp_after):
        state = states[rank % dp_before]
        after += run(chat, rank, state, None, dp_size=dp_after, num_workers=workers[1], seed=seed)[0]
    assert len(before) == dp_before * stop
    assert steps_of([*before, *after]) == uninterrupted(chat, seed)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_within_a_step_every_rank_goes_on_with_its_very_next_batch(chat: Path, num_workers: int) -> None:
    for rank in range(2):
        whole, _ = run(chat, rank, None, None, dp_size=2)
        end = sum(batch.epoch == 0 for batch in whole)
        for stop in (1, 3, end):
            before, state = run(chat, rank, None, stop, dp_size=2, num_workers=num_workers)
            after, _ = run(chat, rank, state, None, dp_size=2)
            assert packs_of([*before, *after]) == packs_of(whole)


@pytest.mark.parametrize("options", [{}, {"shuffle_window": 2}, {"max_patches": None}, {"balance": False}])
def test_every_sample_comes_exactly_once_an_epoch(chat: Path, chats: VlmDataset, options: dict[str, Any]) -> None:
    with stream(chat, **FAST, **options) as loader:
        for _ in range(2):
            seen = Counter(chain.from_iterable(batch.sample_keys for batch in loader))
            assert seen == Counter(chats.index.keys.to_pylist())


def test_every_epoch_and_every_seed_is_packed_anew(chat: Path) -> None:
    with stream(chat, **FAST) as loader:
        first, second = packs_of(loader), packs_of(loader)
        steps = loader.steps(0)
    assert steps > 1
    another = packs_of(epoch_of(chat, seed=1, **FAST))
    contents = [[keys for _, _, keys in epoch if len(keys) > 2] for epoch in (first, second, another)]
    assert {epoch for epoch, _, _ in first} == {0}
    assert {epoch for epoch, _, _ in second} == {1}
    for one in range(3):
        for other in range(one):
            assert len(set(contents[one]) & set(contents[other])) < len(contents[one]) / 2


def test_the_same_configuration_gives_the_same_batches(chat: Path) -> None:
    assert packs_of(epoch_of(chat, **FAST)) == packs_of(epoch_of(chat, **FAST))


def test_an_iterator_that_was_left_early_goes_on(chat: Path) -> None:
    whole = packs_of(epoch_of(chat, **FAST))
    with stream(chat, **FAST) as loader:
        found = []
        for batch in loader:
            found += packs_of([batch])
            if len(found) == 5:
                break
        assert loader.position == Position(0, 1, 1)
        found += packs_of(islice(loader, 2))
        assert loader.position == Position(0, 1, 3)
        found += packs_of(loader)
        assert loader.position == Position(1, 0, 0)
    assert found == whole


def test_prefetched_batches_do_not_count_as_handed_out(chat: Path) -> None:
    with stream(chat, num_workers=2, **FAST) as loader:
        next(iter(loader))
        assert loader.state_dict()["micro_batch"] == 1
        assert loader.stats.batches == 1


def test_going_back_to_an_earlier_epoch(chat: Path) -> None:
    with stream(chat, **FAST) as loader:
        start = loader.state_dict()
        first = packs_of(loader)
        for _ in range(2):
            list(loader)
        assert loader.steps(0) == first[-1][1] + 1
        loader.load_state_dict(start)
        assert packs_of(loader) == first


class TestLastStep:
    """Steps of four packs, the last of which has only three."""

    def counts(self, data: Path, dp_size: int, last: str) -> tuple[int, list[int], list[PackedBatch]]:
        """Whole steps, batches on each rank, and all batches."""
        plans = ((limit, stream(data, max_patches=limit).plan(0)) for limit in range(160, 480, 16))
        limit, packs = next((limit, plan.num_packs) for limit, plan in plans if plan.num_packs % 4 == 3)
        ranks = [
            epoch_of(data, dp_rank=rank, dp_size=dp_size, last=last, max_patches=limit, **FAST)
            for rank in range(dp_size)
        ]
        return packs // 4, [len(rank) for rank in ranks], [batch for rank in ranks for batch in rank]

    @pytest.mark.parametrize("dp_size", [1, 2, 4])
    def test_padded_it_has_empty_packs(self, chat: Path, chats: VlmDataset, dp_size: int) -> None:
        whole, counts, batches = self.counts(chat, dp_size, "pad")
        assert counts == [(whole + 1) * 4 // dp_size] * dp_size
        assert [batch.step for batch in batches if batch.pack == -1] == [whole]
        assert sum(batch.num_samples for batch in batches) == len(chats)

    @pytest.mark.parametrize(("dp_size", "left"), [(1, 3), (2, 2), (4, 1)])
    def test_kept_it_is_as_short_as_all_ranks_can_have_it(
        self, chat: Path, chats: VlmDataset, dp_size: int, left: int
    ) -> None:
        whole, counts, batches = self.counts(chat, dp_size, "keep")
        assert counts == [whole * 4 // dp_size + left] * dp_size
        assert sum(batch.num_samples for batch in batches) == len(chats)

    @pytest.mark.parametrize("dp_size", [1, 2, 4])
    def test_dropped_it_is_not_there(self, chat: Path, dp_size: int) -> None:
        whole, counts, batches = self.counts(chat, dp_size, "drop")
        assert counts == [whole * 4 // dp_size] * dp_size
        assert all(batch.num_samples for batch in batches)
        assert {batch.step for batch in batches} == set(range(whole))


class TestBlend:
    def sizes(self, data: Sequence[Path]) -> list[int]:
        return [len(VlmDataset(each)) for each in data]

    def used(self, data: Sequence[Path], blend: Blend | None, epochs: int = 1) -> list[Counter[str]]:
        found: list[Counter[str]] = [Counter(), Counter()]
        with stream(data, blend=blend, **FAST) as loader:
            for batch in chain.from_iterable(loader for _ in range(epochs)):
                for dataset, key in sample_names(batch):
                    found[dataset][key] += 1
        return found

    def test_without_one_every_dataset_is_read_once(self, chat: Path, receipts: Path) -> None:
        used = self.used([chat, receipts], None)
        assert [set(each.values()) for each in used] == [{1}, {1}]
        assert [len(each) for each in used] == self.sizes([chat, receipts])

    def test_epochs_of_each(self, chat: Path, receipts: Path) -> None:
        chats, receipts_used = self.used([chat, receipts], Blend("epochs", (2, 0.5)), epochs=2)
        assert set(chats.values()) == {4}
        assert set(receipts_used.values()) == {1}

    def test_shares_of_samples(self, chat: Path, receipts: Path) -> None:
        sizes = self.sizes([chat, receipts])
        used = self.used([chat, receipts], Blend("samples", (1, 3)))
        shares = [each.total() for each in used]
        assert sum(shares) == pytest.approx(sum(sizes), abs=1)
        assert shares[1] == pytest.approx(3 * shares[0], abs=3)

    def test_shares_of_tokens(self, chat: Path, receipts: Path) -> None:
        with stream([receipts, chat], blend=Blend("tokens", (3, 1)), **FAST) as loader:
            tokens = [0, 0]
            for batch in loader:
                for origin in batch.origins:
                    tokens[origin.dataset] += int(loader.datasets[origin.dataset].index.lengths[origin.index])
        assert tokens[0] / sum(tokens) == pytest.approx(0.75, abs=0.05)

    def test_a_sample_says_where_it_came_from(self, chat: Path, receipts: Path) -> None:
        datasets = [VlmDataset(chat), VlmDataset(receipts)]
        seen = set()
        for batch in epoch_of([chat, receipts]):
            for number, (origin, key) in enumerate(zip(batch.origins, batch.sample_keys, strict=True)):
                sample = datasets[origin.dataset][origin.index]
                assert sample.key == key
                assert batch.input_ids is not None
                begin = int(batch.cu_seqlens_padded[number])
                ids = batch.input_ids[0, begin : begin + sample.length]
                assert ids.tolist() == sample.input_ids[: sample.length].tolist()
                seen.add(origin.dataset)
        assert seen == {0, 1}
