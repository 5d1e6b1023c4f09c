from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.chat_rows import build_mixed


@pytest.fixture(scope="package")
def sound_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of text-only and image samples in four shards, one of them empty. Read-only by agreement."""
    return build_mixed(tmp_path_factory.mktemp("sound"))


@pytest.fixture
def damaged(sound_dataset: Path, tmp_path: Path) -> Path:
    """A copy of it for a test to damage."""
    return Path(shutil.copytree(sound_dataset, tmp_path / "damaged"))
