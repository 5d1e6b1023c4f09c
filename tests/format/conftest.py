from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.chat_rows import build_mixed


@pytest.fixture(scope="package")
def mixed_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of text-only and image samples in four shards, one of them empty. Read-only by agreement."""
    return build_mixed(tmp_path_factory.mktemp("mixed"))


@pytest.fixture
def mixed_copy(mixed_dataset: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may damage."""
    return Path(shutil.copytree(mixed_dataset, tmp_path / "copy"))
