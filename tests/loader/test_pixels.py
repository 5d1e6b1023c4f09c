"""The option ``pixels``: batches that hold expanded pixels, equal to those expanded afterwards."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.loader import helpers
from tests.loader.helpers import assert_same, differences
from tests.loader.synthetic import write_dataset
from tests.loader.test_masking import damage
from vlmdata.batch import PackedBatch
from vlmdata.errors import UsageError
from vlmdata.loader.loader import StreamingLoader

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
every_dtype = pytest.mark.parametrize("pixels", DTYPES)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples with none to three images."""
    return write_dataset(tmp_path_factory.mktemp("pixels") / "data", shards=3, samples_per_shard=8, weighted=True)


def stream(folder: Path, **options: Any) -> StreamingLoader:
    return helpers.stream(folder, max_patches=400, **options)


def epoch_of(folder: Path, **options: Any) -> list[PackedBatch]:
    with stream(folder, **options) as loader:
        return list(loader)


def expanded(batch: PackedBatch, pixels: str) -> PackedBatch:
    """What a batch of uint8 patches should be with the option."""
    if batch.patches is None or pixels == "uint8":
        return batch
    return dataclasses.replace(batch, patches=batch.pixel_values(DTYPES[pixels]))


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pixels=st.sampled_from(["uint8", *DTYPES]),
    parts=st.sets(st.sampled_from(["tokens", "labels", "pixels"])),
    ranks=st.integers(1, 3),
    rank=st.integers(0, 2),
    verify=st.sampled_from(["pixels", "stored", "off"]),
    on_damage=st.sampled_from(["raise", "mask"]),
)
def test_expanded_batches_equal_uint8_ones_in_every_part_and_slice(
    data: Path, pixels: str, parts: set[str], ranks: int, rank: int, verify: str, on_damage: str
) -> None:
    options: dict[str, Any] = {"parts": tuple(sorted(parts)), "context_parallel": ranks}
    if ranks > 1:
        options["context_parallel_rank"] = rank % ranks
    if verify != "off":
        options["on_damage"] = on_damage
    stored = epoch_of(data, **options)
    found = epoch_of(data, pixels=pixels, verify=verify, **options)
    assert_same(found, [expanded(batch, pixels) for batch in stored])
    assert any(batch.patches is not None and len(batch.patches) for batch in found) == ("pixels" in parts)


@every_dtype
@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_expand(data: Path, pixels: str, num_workers: int) -> None:
    found = epoch_of(data, pixels=pixels, num_workers=num_workers)
    assert_same(found, [expanded(batch, pixels) for batch in epoch_of(data)])


@every_dtype
def test_a_slice_of_an_expanded_batch_is_the_expanded_slice(data: Path, pixels: str) -> None:
    for rank in range(2):
        slices = epoch_of(data, pixels=pixels, context_parallel=2, context_parallel_rank=rank)
        wholes = epoch_of(data, pixels=pixels, context_parallel=2)
        assert_same(slices, [whole.context_parallel_shard(rank, 2) for whole in wholes])


@every_dtype
def test_masked_samples_have_the_values_of_black(data: Path, tmp_path: Path, pixels: str) -> None:
    folder = Path(shutil.copytree(data, tmp_path / "data"))
    damage(folder, (6, "patches"), (17, "loss_mask"))
    stored = epoch_of(folder, on_damage="mask")
    found = epoch_of(folder, on_damage="mask", pixels=pixels)
    assert_same(found, [expanded(batch, pixels) for batch in stored])
    black = [batch for batch in found if batch.masked]
    assert black
    assert all((batch.patches == -1).any() for batch in black)  # (0 - 127.5) / 127.5


def test_expanded_values_are_given_without_work(data: Path) -> None:
    stored = epoch_of(data)
    for pixels, dtype in DTYPES.items():
        for batch, of in zip(epoch_of(data, pixels=pixels), stored, strict=True):
            assert batch.patches is not None
            assert batch.patches.dtype == dtype
            assert batch.pixel_values() is batch.patches
            assert batch.pixel_values(dtype) is batch.patches
            assert not set(differences(batch, of)) - {"patches"}


def test_float32_is_rounded_like_uint8_and_rounded_values_are_not_widened(data: Path) -> None:
    stored = epoch_of(data)
    for batch, of in zip(epoch_of(data, pixels="float32"), stored, strict=True):
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            assert torch.equal(batch.pixel_values(dtype), of.pixel_values(dtype))
    batch = epoch_of(data, pixels="bfloat16")[0]
    with pytest.raises(ValueError, match=r"rounded the pixels to torch.bfloat16, so their values in torch.float32"):
        batch.pixel_values(torch.float32)
    assert of.pixel_values().dtype == torch.float32


def test_a_run_goes_on_with_another_dtype(data: Path) -> None:
    whole = epoch_of(data, pixels="float32")
    with stream(data, pixels="bfloat16") as loader:
        next(iter(loader))
        state = loader.state_dict()
    with stream(data, pixels="float32", num_workers=1) as loader:
        loader.load_state_dict(state)
        assert_same(loader, whole[1:])


def test_an_unknown_dtype_is_refused(data: Path) -> None:
    with pytest.raises(UsageError, match=r"pixels is 'float16'; it must be one of uint8, bfloat16, float32"):
        stream(data, pixels="float16")
