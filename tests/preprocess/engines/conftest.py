"""The dataset that every engine makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import tree_bytes
from tests.preprocess.engines.every_engine import CONFIG
from vlmdata.preprocess.run.dataset import preprocess_dataset
from vlmdata.preprocess.sources.open import open_source


@pytest.fixture(scope="module")
def reference(cord_parquet: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The dataset made in this process."""
    out = tmp_path_factory.mktemp("reference") / "out"
    preprocess_dataset(open_source(str(cord_parquet)), out, CONFIG)
    return tree_bytes(out)
