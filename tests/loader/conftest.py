"""Two small datasets: chats with no, one and several images over eight shards, and receipts of other shapes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chat_rows import write_jsonl
from tests.conftest import build_dataset
from tests.loader.helpers import forget_earlier_children, worker_pids
from tests.loader.rows import chat_rows
from vlmdata.format.dataset import VlmDataset
from vlmdata.preprocess.config import ImageConfig


@pytest.fixture(scope="session")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 chats, stored at multiples of 16, in 8 shards."""
    folder = tmp_path_factory.mktemp("loader")
    source = write_jsonl(folder / "chat.jsonl", chat_rows(48))
    return build_dataset(
        source, folder / "chat", recipe="chat", image=ImageConfig(1024, 16384), rows_per_shard=6, pad_multiple=16
    )


@pytest.fixture(scope="session")
def receipts(tmp_path_factory: pytest.TempPathFactory, cord_parquet: Path) -> Path:
    """40 receipts, stored at multiples of 5, in 4 shards."""
    folder = tmp_path_factory.mktemp("loader") / "receipts"
    return build_dataset(cord_parquet, folder, image=ImageConfig(1024, 16384), rows_per_shard=10, pad_multiple=5)


@pytest.fixture(scope="session")
def chats(chat: Path) -> VlmDataset:
    """The chats, opened: what batches are compared with."""
    dataset = VlmDataset(chat)
    images = set(dataset.index.item_counts.tolist())
    assert images == {0, 1, 2}  # else the tests below prove less than they say
    assert len(dataset.manifest.shards) == 8
    return dataset


@pytest.fixture
def chat_copy(chat: Path, tmp_path: Path) -> Path:
    """The chats in a folder of their own, to be damaged."""
    return Path(shutil.copytree(chat, tmp_path / "chat"))


@pytest.fixture(autouse=True)
def _no_worker_is_left() -> Iterator[None]:
    forget_earlier_children()
    yield
    assert not worker_pids()


@pytest.fixture
def damage(chat_copy: Path) -> Callable[[str, int], None]:
    """Flips a byte in a field of a sample of the copy."""
    dataset = VlmDataset(chat_copy)

    def flip(field: str, sample: int) -> None:
        path = dataset.shard_path(int(dataset.index.shard[sample]))
        offset = int(dataset.index.data_offsets[field][sample]) + 4
        with open(path, "r+b") as file:
            file.seek(offset)
            value = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([value ^ 1]))

    return flip
