"""What is in a batch: the samples as they were stored, and nothing that was not asked for."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.loader.helpers import epoch_of, stream
from tests.loader.synthetic import write_dataset
from vlmdata.batch import IGNORE_INDEX, PackedBatch
from vlmdata.families.qwen3_5 import FAMILY
from vlmdata.format.dataset import VlmDataset
from vlmdata.packing.alignment import alignment


def segments(bounds: torch.Tensor) -> list[tuple[int, int]]:
    return list(pairwise(bounds.tolist()))


def assert_holds_its_samples(batch: PackedBatch, dataset: VlmDataset) -> None:
    """Takes a whole pack apart, sample by sample and field by field."""
    assert batch.input_ids is not None
    assert batch.labels is not None
    assert batch.loss_mask is not None
    assert batch.patches is not None
    ids, labels, mask = (field[0].numpy() for field in (batch.input_ids, batch.labels, batch.loss_mask))
    positions, padding = batch.position_ids[:, 0].numpy(), batch.padding_mask[0].numpy()
    lengths = np.diff(batch.cu_seqlens.numpy())
    image = patch = 0
    for number, (begin, end) in enumerate(segments(batch.cu_seqlens_padded)):
        length = int(lengths[number])
        tokens, rest = slice(begin, begin + length), slice(begin + length, end)
        assert (ids[rest] == dataset.manifest.tokenizer.pad).all()
        assert (positions[:, rest] == 0).all()
        assert padding[rest].all()
        assert (labels[rest] == IGNORE_INDEX).all()
        assert not padding[tokens].any()
        if number == batch.num_samples:  # the tail, or an empty pack
            assert length == 0
            continue
        origin = batch.origins[number]
        sample = dataset[origin.index]
        assert batch.sample_keys[number] == sample.key
        assert (origin.shard, origin.row) == (
            dataset.index.shard[origin.index],
            dataset.index.source_row[origin.index],
        )
        assert length == sample.length
        np.testing.assert_array_equal(ids[tokens], sample.input_ids[:length])
        np.testing.assert_array_equal(positions[:, tokens], sample.position_ids[:, :length])
        target = sample.loss_mask[1:length].astype(bool)  # the token is a target: the one before it predicts it
        np.testing.assert_array_equal(labels[tokens][:-1], np.where(target, sample.input_ids[1:length], IGNORE_INDEX))
        assert labels[tokens][-1] == IGNORE_INDEX  # never the next sample's first token
        images, patches = len(sample.image_grid_thw), len(sample.patches)
        np.testing.assert_array_equal(batch.image_grid_thw[image : image + images], sample.image_grid_thw)
        np.testing.assert_array_equal(batch.patches[patch : patch + patches], sample.patches)
        image, patch = image + images, patch + patches
    assert image == len(batch.image_grid_thw)
    assert patch == len(batch.patches)
    np.testing.assert_array_equal(mask, labels != IGNORE_INDEX)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_unpacking_a_batch_gives_back_the_samples_bit_for_bit(chat: Path, chats: VlmDataset, num_workers: int) -> None:
    batches = epoch_of(chat, num_workers=num_workers)
    assert any(batch.num_samples > 3 for batch in batches)
    for batch in batches:
        assert_holds_its_samples(batch, chats)


def test_an_epoch_holds_every_target_once(chat: Path, chats: VlmDataset) -> None:
    first_tokens = [sample.loss_mask[0] for sample in chats]
    assert not any(first_tokens)  # a target there would have nothing to be predicted from
    targets = sum(int(batch.loss_mask.sum()) for batch in epoch_of(chat) if batch.loss_mask is not None)
    assert targets == chats.index.num_targets.sum() == chats.manifest.totals.targets


def test_a_first_token_is_no_target_of_the_sample_before(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "data", first_token_is_target=True)  # preprocess makes no such thing
    dataset = VlmDataset(data)
    assert all(sample.loss_mask[0] for sample in dataset)
    for batch in epoch_of(data, capacity=1024, max_patches=None):
        assert_holds_its_samples(batch, dataset)


def test_images_start_at_their_first_token(chat: Path, chats: VlmDataset) -> None:
    image_token = chats.manifest.tokenizer.image
    for batch in epoch_of(chat):
        assert batch.input_ids is not None
        ids = batch.input_ids[0]
        starts, counts = batch.image_starts.tolist(), (batch.image_grid_thw.prod(1) // 4).tolist()
        for start, count in zip(starts, counts, strict=True):
            assert ids[start - 1] != image_token
            assert (ids[start : start + count] == image_token).all()
            assert ids[start + count] != image_token
        assert sum(counts) == int((ids == image_token).sum())


def test_shapes_and_dtypes_are_the_documented_ones(chat: Path) -> None:
    for batch in epoch_of(chat):
        tokens, images = batch.total_tokens, len(batch.image_grid_thw)
        patches = int(batch.image_grid_thw.prod(1).sum())
        expected = {
            "input_ids": (torch.int64, (1, tokens)),
            "labels": (torch.int64, (1, tokens)),
            "loss_mask": (torch.float32, (1, tokens)),
            "loss_weights": (torch.float32, (1, tokens)),
            "position_ids": (torch.int64, (3, 1, tokens)),
            "padding_mask": (torch.bool, (1, tokens)),
            "cu_seqlens": (torch.int32, (len(batch.cu_seqlens),)),
            "cu_seqlens_padded": (torch.int32, (len(batch.cu_seqlens),)),
            "image_grid_thw": (torch.int64, (images, 3)),
            "image_starts": (torch.int64, (images,)),
            "image_indices": (torch.int64, (images,)),
            "patches": (torch.uint8, (patches, 768)),
        }
        assert {name: (t.dtype, tuple(t.shape)) for name, t in batch.tensors().items()} == expected
        assert batch.image_indices.tolist() == list(range(images))
        assert batch.context_parallel is None


def test_the_counts_of_a_batch_agree(chat: Path) -> None:
    for batch in epoch_of(chat, pad_multiple=8):
        padded = np.diff(batch.cu_seqlens_padded.numpy())
        assert batch.max_seqlen == padded.max()
        assert batch.total_tokens == batch.cu_seqlens_padded[-1] == padded.sum()
        assert batch.true_tokens == batch.cu_seqlens[-1] == int((~batch.padding_mask).sum())
        assert len(batch.origins) == batch.num_samples
        assert (np.diff(batch.cu_seqlens.numpy()) <= padded).all()


@given(
    context_parallel=st.integers(1, 4),
    tensor_parallel=st.integers(1, 4),
    sequence_parallel=st.booleans(),
    pad_multiple=st.sampled_from([1, 3, 16]),
    stored_at_5=st.booleans(),
)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_alignment_whatever_the_shards_were_padded_to(
    chat: Path,
    receipts: Path,
    context_parallel: int,
    tensor_parallel: int,
    sequence_parallel: bool,
    pad_multiple: int,
    stored_at_5: bool,
) -> None:
    data = receipts if stored_at_5 else chat
    multiple = alignment(context_parallel, tensor_parallel, sequence_parallel, pad_multiple)
    batches = epoch_of(
        data,
        capacity=1200,
        context_parallel=context_parallel,
        tensor_parallel=tensor_parallel,
        sequence_parallel=sequence_parallel,
        pad_multiple=pad_multiple,
    )
    dataset = VlmDataset(data)
    for batch in batches:
        assert_holds_its_samples(batch, dataset)
        padded, lengths = np.diff(batch.cu_seqlens_padded.numpy()), np.diff(batch.cu_seqlens.numpy())
        assert (padded % multiple == 0).all()
        assert (padded[: batch.num_samples] - lengths[: batch.num_samples] < multiple).all()


def test_padded_to_capacity_every_pack_is_as_long_and_the_tail_is_a_segment(chat: Path, chats: VlmDataset) -> None:
    batches = epoch_of(chat, pad_to_capacity=True)
    tails = 0
    for batch in batches:
        assert batch.total_tokens == 832
        assert_holds_its_samples(batch, chats)
        tails += len(batch.cu_seqlens) - 1 > batch.num_samples
    assert tails >= len(batches) - 1


@pytest.mark.parametrize(("pad_to_capacity", "tokens"), [(False, 8), (True, 832)])
def test_an_empty_pack_is_all_padding(chat: Path, chats: VlmDataset, pad_to_capacity: bool, tokens: int) -> None:
    batches = epoch_of(chat, global_batch=32, context_parallel=4, pad_to_capacity=pad_to_capacity)
    assert len(batches) == 32
    empty = [batch for batch in batches if batch.pack == -1]
    assert empty
    for batch in empty:
        assert_holds_its_samples(batch, chats)
        assert (batch.total_tokens, batch.true_tokens, batch.num_samples) == (tokens, 0, 0)
        assert batch.max_seqlen == tokens
        assert batch.cu_seqlens.tolist() == [0, 0]
        assert batch.cu_seqlens_padded.tolist() == [0, tokens]
        assert batch.image_grid_thw.shape == (0, 3)
        assert batch.pixel_values().shape == (0, 1536)


def test_pixel_values_are_those_of_the_samples(chat: Path, chats: VlmDataset) -> None:
    for batch in epoch_of(chat):
        samples = [chats[origin.index] for origin in batch.origins]
        stored = torch.cat([torch.from_numpy(sample.patches.copy()) for sample in samples] or [torch.zeros(0, 768)])
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(batch.pixel_values(dtype), FAMILY.pixel_values(stored.to(torch.uint8), dtype))


def test_the_patch_limit_is_kept(chat: Path) -> None:
    sizes = [int(batch.image_grid_thw.prod(1).sum()) for batch in epoch_of(chat, max_patches=130)]
    assert max(sizes) <= 130
    assert len(sizes) > len(epoch_of(chat, max_patches=None))


def test_a_batch_is_frozen_and_its_clone_is_ones_own(chat: Path) -> None:
    with stream(chat) as loader:
        batch = next(iter(loader))
        clone = batch.clone()
        assert clone.input_ids is not None
        clone.input_ids.fill_(7)
        assert batch.input_ids is not None
        assert not bool((batch.input_ids == 7).all())
        with pytest.raises(dataclasses.FrozenInstanceError):
            batch.step = 3  # type: ignore[misc]


def test_moving_to_where_it_is_copies_nothing(chat: Path) -> None:
    with stream(chat) as loader:
        batch = next(iter(loader))
        moved = batch.to("cpu")
        assert {name: t.data_ptr() for name, t in moved.tensors().items()} == {
            name: t.data_ptr() for name, t in batch.tensors().items()
        }
        elsewhere = batch.to("meta")
        assert {t.device.type for t in elsewhere.tensors().values()} == {"meta"}
        assert elsewhere.sample_keys == batch.sample_keys
