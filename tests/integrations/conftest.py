"""Datasets of random samples, and packs of them, by family: made without preprocess."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.integrations.tiny_models import family_of
from tests.loader.helpers import epoch_of
from tests.loader.synthetic import write_dataset
from vlmdata.batch import PackedBatch
from vlmdata.format.dataset import VlmDataset


@pytest.fixture(scope="session")
def random_data(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The dataset of a family: 16 weighted samples with no to three images, one of a single token."""

    @cache
    def of(family: str) -> Path:
        return write_dataset(tmp_path_factory.mktemp(family) / "data", 2, 8, family=family, weighted=True)

    return of


@pytest.fixture(scope="session")
def packs(random_data: Callable[[str], Path]) -> Callable[[str], list[PackedBatch]]:
    """The packs of a model type: with and without images, of one and of many samples, with padding."""

    @cache
    def of(model_type: str) -> list[PackedBatch]:
        name = family_of(model_type)
        capacity = 2048 if name == "internvl" else 1024  # a tile has 256 tokens
        options = {"capacity": capacity, "max_patches": None, "global_batch": 2, "pad_multiple": 4}
        batches = epoch_of(random_data(name), **options)
        return [batch.clone() for batch in batches]

    return of


@pytest.fixture(scope="session")
def random_videos(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The dataset of a family: 16 weighted samples with no to three images and videos."""

    @cache
    def of(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family) / "data"
        return write_dataset(folder, 2, 8, seed=1, family=family, weighted=True, videos=True)

    return of


@pytest.fixture(scope="session")
def samples(random_data: Callable[[str], Path]) -> Callable[[str], VlmDataset]:
    """The dataset behind the packs of a model type."""
    return lambda model_type: VlmDataset(random_data(family_of(model_type)))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
