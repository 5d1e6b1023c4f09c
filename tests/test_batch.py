"""A packed batch by itself: what its methods do, without a loader."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from vlmdata.batch import HostArrays, PackedBatch, SampleOrigin, Slice
from vlmdata.packing.item_runs import pack_runs


def make_batch(**fields: Any) -> PackedBatch:
    """Two samples of 6 and 3 tokens at alignment 4, with two images of 16 and 4 patches in the first."""
    tokens = 12
    ids = torch.arange(100, 100 + tokens)[None]
    labels = ids.roll(-1, 1)
    labels[0, [0, 1, 5, 6, 7, 10, 11]] = -100
    padding = torch.zeros(1, tokens, dtype=torch.bool)
    padding[0, [6, 7, 11]] = True
    plain: dict[str, Any] = {
        "input_ids": ids,
        "labels": labels,
        "loss_mask": (labels != -100).float(),
        "position_ids": torch.arange(3 * tokens).view(3, 1, tokens),
        "padding_mask": padding,
        "cu_seqlens": torch.tensor([0, 6, 9], dtype=torch.int32),
        "cu_seqlens_padded": torch.tensor([0, 8, 12], dtype=torch.int32),
        "max_seqlen": 8,
        "total_tokens": tokens,
        "true_tokens": 9,
        "image_grid_thw": torch.tensor([[1, 2, 2], [1, 4, 4]]),
        "image_starts": torch.tensor([0, 1]),
        "image_indices": torch.tensor([0, 1]),
        "patches": torch.arange(20 * 768).remainder(251).to(torch.uint8).view(20, 768),
        "sample_keys": ("a", "b"),
        "origins": (SampleOrigin(0, 0, 3, 2), SampleOrigin(0, 1, 9, 7)),
        "epoch": 1,
        "step": 2,
        "micro_batch": 3,
        "pack": 4,
    }
    return PackedBatch(**{**plain, **fields})


def test_tensors_are_those_that_are_present() -> None:
    batch = make_batch(labels=None, loss_mask=None, patches=None)
    assert list(batch.tensors()) == [
        "input_ids",
        "position_ids",
        "padding_mask",
        "cu_seqlens",
        "cu_seqlens_padded",
        "image_grid_thw",
        "image_starts",
        "image_indices",
    ]
    assert batch.num_samples == 2


@pytest.mark.parametrize("method", ["clone", "to", "context_parallel_shard"])
def test_what_is_no_tensor_is_carried_along(method: str) -> None:
    arguments: dict[str, tuple[Any, ...]] = {"clone": (), "to": ("meta",), "context_parallel_shard": (0, 2)}
    batch = make_batch(labels=None)
    other = getattr(batch, method)(*arguments[method])
    assert other.labels is None
    for field in dataclasses.fields(PackedBatch):
        if field.name not in ("context_parallel", "host") and not isinstance(getattr(batch, field.name), torch.Tensor):
            assert getattr(other, field.name) == getattr(batch, field.name)


@pytest.mark.parametrize("method", ["clone", "to", "context_parallel_shard"])
def test_the_host_layout_is_that_of_the_tensors(method: str) -> None:
    arguments: dict[str, tuple[Any, ...]] = {"clone": (), "to": ("cpu",), "context_parallel_shard": (1, 2)}
    batch = make_batch()
    for made in (batch, getattr(batch, method)(*arguments[method])):
        for field in dataclasses.fields(HostArrays):
            array = getattr(made.host, field.name)
            assert array.dtype == np.int64
            tensor = getattr(made, field.name)  # None of videos, in a batch without any
            assert array.tolist() == ([] if tensor is None else tensor.tolist()), field.name


def test_clones_share_nothing_and_moves_to_the_same_device_share_all() -> None:
    batch = make_batch()
    for name, tensor in batch.clone().tensors().items():
        assert torch.equal(tensor, getattr(batch, name))
        assert tensor.data_ptr() != getattr(batch, name).data_ptr()
    for name, tensor in batch.to("cpu").tensors().items():
        assert tensor.data_ptr() == getattr(batch, name).data_ptr()


def test_weights_that_are_not_given_are_the_mask_itself_and_stay_one_tensor() -> None:
    batch = make_batch()
    for made in (batch, batch.to("cpu"), batch.to("meta"), batch.context_parallel_shard(1, 2)):
        assert made.loss_weights is made.loss_mask
    clone = batch.clone()
    assert clone.loss_weights is not None
    clone.loss_weights.mul_(2)  # a clone may be written to, tensor by tensor
    assert torch.equal(clone.loss_mask, batch.loss_mask)


def test_weights_that_are_given_go_where_the_labels_go() -> None:
    weights = (make_batch().labels != -100) * torch.linspace(0.5, 2, 12)
    batch = make_batch(loss_weights=weights)
    assert torch.equal(batch.to("cpu").loss_weights, weights)
    shard = batch.context_parallel_shard(1, 2)
    assert torch.equal(shard.loss_weights, weights[:, [2, 3, 4, 5, 9, 10]])
    assert torch.equal(shard.loss_weights > 0, shard.labels != -100)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_tensors_are_equal() -> None:
    batch = make_batch()
    for name, tensor in batch.pin_memory().tensors().items():
        assert tensor.is_pinned()
        assert torch.equal(tensor, getattr(batch, name))


def test_a_shard_has_two_chunks_of_every_segment_and_its_images() -> None:
    batch = make_batch()
    # Chunks of 2 tokens in the first segment and of 1 in the second; rank 1 of 2 has the two in the middle.
    middle = [2, 3, 4, 5, 9, 10]
    shard = batch.context_parallel_shard(1, 2)
    for name in ("input_ids", "labels", "loss_mask", "loss_weights", "padding_mask"):
        assert torch.equal(getattr(shard, name), getattr(batch, name)[:, middle])
    for name in ("position_ids", "cu_seqlens", "cu_seqlens_padded", "image_grid_thw", "image_starts"):
        assert torch.equal(getattr(shard, name), getattr(batch, name))
    assert pack_runs(batch.image_grid_thw, 2).owners.tolist() == [1, 0]
    assert shard.image_indices.tolist() == [0]
    assert shard.patches is not None
    assert batch.patches is not None
    assert torch.equal(shard.patches, batch.patches[:4])
    other = batch.context_parallel_shard(0, 2)
    assert other.patches is not None
    assert torch.equal(other.patches, batch.patches[4:])
    assert (shard.context_parallel, other.context_parallel) == (Slice(1, 2), Slice(0, 2))


def test_a_rank_without_images_has_an_empty_tensor_of_them() -> None:
    lone = make_batch(
        image_grid_thw=torch.tensor([[1, 2, 2]]),
        image_starts=torch.tensor([0]),
        image_indices=torch.tensor([0]),
        patches=torch.zeros(4, 768, dtype=torch.uint8),
    ).context_parallel_shard(1, 2)
    assert lone.patches is not None
    assert lone.patches.shape == (0, 768)
    assert lone.image_indices.dtype == torch.int64
    assert lone.pixel_values().shape == (0, 1536)


def test_no_shard_of_a_shard_and_none_of_uneven_segments() -> None:
    batch = make_batch()
    with pytest.raises(ValueError, match="already slice 0 of 2"):
        batch.context_parallel_shard(0, 2).context_parallel_shard(0, 2)
    with pytest.raises(ValueError, match="sample 1 has 4 padded tokens"):
        batch.context_parallel_shard(0, 4)
    with pytest.raises(ValueError, match="rank 2 of size 2"):
        batch.context_parallel_shard(2, 2)


def test_pixel_values_are_normalised_and_doubled() -> None:
    batch = make_batch()
    assert batch.patches is not None
    values = batch.pixel_values().view(20, 3, 2, 256)
    expected = (batch.patches.view(20, 3, 256).float() - 127.5) / 127.5
    assert torch.equal(values[:, :, 0], expected)
    assert torch.equal(values[:, :, 1], expected)
    assert batch.pixel_values(torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="without the part 'pixels'"):
        make_batch(patches=None).pixel_values()
