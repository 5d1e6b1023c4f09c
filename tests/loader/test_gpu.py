"""The loader and a CUDA device. The checks are in ``gpu_checks.py``, which also runs without pytest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.loader.gpu_checks import CHECKS
from tests.loader.helpers import stream
from tests.loader.synthetic import write_dataset
from tests.loader.test_content import assert_holds_its_samples
from vlmdata.format.dataset import VlmDataset


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("synthetic") / "data")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_the_device(synthetic: Path, check: Callable[[Path], None]) -> None:
    check(synthetic)


def test_the_synthetic_dataset_is_sound(synthetic: Path) -> None:
    dataset = VlmDataset(synthetic)
    assert set(dataset.index.item_counts.tolist()) == {0, 1, 2, 3}
    with stream(synthetic, capacity=1024, max_patches=None) as loader:
        for batch in loader:
            assert_holds_its_samples(batch, dataset)
