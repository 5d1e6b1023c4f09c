"""Loss weights in batches: each label has its token's, whatever is mixed or sliced; without any, they are the mask."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.loader.helpers import assert_same, epoch_of, stream
from tests.loader.rows import chat_rows
from tests.loader.synthetic import write_dataset
from tests.weighted import build_weighted, with_weights
from vlmdata.batch import PackedBatch
from vlmdata.errors import DatasetFormatError
from vlmdata.format.dataset import VlmDataset
from vlmdata.format.schema import LOSS_WEIGHTS
from vlmdata.loader.fill.buffers import BufferPool


@pytest.fixture(scope="module")
def weighted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """32 chats, of which every fifth has no weights; in 6 shards."""
    rows = with_weights(chat_rows(32))
    return build_weighted(tmp_path_factory.mktemp("weighted"), rows, rows_per_shard=6)


def assert_weights_are_those_of_the_samples(batch: PackedBatch, datasets: list[VlmDataset]) -> None:
    """Takes a whole pack apart: the weight of a label is that of the token it names."""
    assert batch.loss_weights is not None
    assert batch.loss_mask is not None
    expected = np.zeros(batch.total_tokens, np.float32)
    bounds = list(pairwise(batch.cu_seqlens_padded.tolist()))
    for (begin, _), origin in zip(bounds, batch.origins, strict=False):
        sample = datasets[origin.dataset][origin.index]
        weights = sample.loss_mask if sample.loss_weights is None else sample.loss_weights
        expected[begin : begin + sample.length - 1] = weights[1 : sample.length]
    found = batch.loss_weights[0].numpy()
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(found > 0, batch.loss_mask[0].numpy() == 1)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_label_weighs_what_its_token_does(weighted: Path, num_workers: int) -> None:
    dataset, batches = VlmDataset(weighted), epoch_of(weighted, num_workers=num_workers)
    assert LOSS_WEIGHTS in dataset.manifest.features
    assert {sample.loss_weights is None for sample in dataset} == {True, False}
    for batch in batches:
        assert_weights_are_those_of_the_samples(batch, [dataset])
    assert len({float(w) for batch in batches for w in batch.loss_weights.flatten()}) > 5  # type: ignore[union-attr]


def test_a_first_token_weighs_nothing_in_the_sample_before(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "data", first_token_is_target=True, weighted=True)
    dataset = VlmDataset(data)
    assert all(sample.loss_weights is not None and sample.loss_weights[0] > 0 for sample in dataset)
    for batch in epoch_of(data, capacity=1024, max_patches=None):
        assert_weights_are_those_of_the_samples(batch, [dataset])


@given(
    capacity=st.integers(18, 30).map(lambda n: 48 * n),
    pad_multiple=st.sampled_from([1, 3, 16]),
    pad_to_capacity=st.booleans(),
    context_parallel=st.sampled_from([1, 2]),
)
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_with_and_without_weights_mixed_whatever_the_packing(
    chat: Path, weighted: Path, capacity: int, pad_multiple: int, pad_to_capacity: bool, context_parallel: int
) -> None:
    options = {"capacity": capacity, "pad_multiple": pad_multiple, "context_parallel": context_parallel}
    batches = epoch_of([chat, weighted], pad_to_capacity=pad_to_capacity, global_batch=16, **options)
    datasets = [VlmDataset(chat), VlmDataset(weighted)]
    for batch in batches:
        assert_weights_are_those_of_the_samples(batch, datasets)
    assert any(len({origin.dataset for origin in batch.origins}) == 2 for batch in batches)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_ranks_slice_is_the_slice_of_the_whole(chat: Path, weighted: Path, num_workers: int) -> None:
    data = [weighted, chat]
    wholes = epoch_of(data, context_parallel=2)
    for rank in range(2):
        slices = epoch_of(data, context_parallel=2, context_parallel_rank=rank, num_workers=num_workers)
        assert_same(slices, [whole.context_parallel_shard(rank, 2) for whole in wholes])


def test_without_weights_it_is_the_mask_and_costs_nothing(chat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    acquire = BufferPool.acquire
    monkeypatch.setattr(BufferPool, "acquire", lambda pool, size: (asked.append(size), acquire(pool, size))[1])
    for batch in epoch_of(chat, parts=("tokens", "labels")):
        assert batch.loss_weights is batch.loss_mask
    tokens = [batch.total_tokens for batch in epoch_of(chat)]
    # Positions, padding mask, ids, labels and mask, each filled up to 64 bytes.
    sizes = [sum(-(-count * width // 64) * 64 for width in (24, 1, 8, 8, 4)) for count in tokens]
    assert asked[: len(sizes)] == sizes


def test_a_pack_without_a_weighted_sample_has_the_mask_too(chat: Path, weighted: Path) -> None:
    plain = VlmDataset(weighted)
    for batch in epoch_of([chat, weighted], capacity=832):
        own = [plain[origin.index].loss_weights for origin in batch.origins if origin.dataset == 1]
        assert (batch.loss_weights is batch.loss_mask) == all(weights is None for weights in own)


@pytest.mark.parametrize("parts", [("tokens", "pixels"), ()])
def test_without_labels_there_are_none_and_none_are_read(weighted: Path, parts: tuple[str, ...]) -> None:
    assert all(batch.loss_weights is None for batch in epoch_of(weighted, parts=parts))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_flipped_bit_is_found_and_named(weighted: Path, tmp_path: Path, num_workers: int) -> None:
    copy = Path(shutil.copytree(weighted, tmp_path / "copy"))
    dataset = VlmDataset(copy)
    chosen = next(i for i, sample in enumerate(dataset) if sample.loss_weights is not None)
    path = dataset.shard_path(int(dataset.index.shard[chosen]))
    data = bytearray(path.read_bytes())
    data[int(dataset.index.data_offsets["loss_weights"][chosen]) + 9] ^= 4
    path.write_bytes(data)
    with pytest.raises(DatasetFormatError, match=rf"key {dataset.index.key(chosen)} loss_weights: the data changed"):
        epoch_of(copy, num_workers=num_workers)
    epoch_of(copy, parts=("tokens", "pixels"))  # what is not read is not checked


def test_moved_and_sliced_batches_keep_their_weights(weighted: Path) -> None:
    with stream(weighted, context_parallel=2, capacity=1200) as loader:
        batch = next(each for each in loader if each.loss_weights is not each.loss_mask)
        weights = batch.loss_weights
        assert weights is not None
        assert torch.equal(batch.clone().loss_weights, weights)  # type: ignore[arg-type]
        assert batch.to("cpu").loss_weights is weights
        halves = [batch.context_parallel_shard(rank, 2).loss_weights for rank in range(2)]
        assert sum(float(half.sum()) for half in halves if half is not None) == pytest.approx(float(weights.sum()))
