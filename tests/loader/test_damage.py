"""Shards that changed after preprocessing: which shard, row, key and field, and what was expected."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.loader.helpers import assert_same, epoch_of, stream
from vlmdata.errors import DatasetFormatError, ResourceError, VlmdataError
from vlmdata.format.dataset import VlmDataset

Damage = Callable[[str, int], None]
#: A chat with an image, in the third shard.
SAMPLE = 12


def expected_checksum(dataset: VlmDataset, field: str) -> int:
    if field == "patches":
        return int(dataset.index.item_checksums[dataset.index.grid_offsets[SAMPLE]])
    return int(dataset.index.member_checksums[field][SAMPLE])


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("field", ["input_ids", "loss_mask", "position_ids", "patches"])
def test_a_flipped_bit_is_found_and_named(
    chat_copy: Path, chats: VlmDataset, damage: Damage, field: str, num_workers: int
) -> None:
    damage(field, SAMPLE)
    with stream(chat_copy, num_workers=num_workers) as loader, pytest.raises(DatasetFormatError) as found:
        list(loader)
    row, key = int(chats.index.source_row[SAMPLE]), chats.index.key(SAMPLE)
    assert f"{chat_copy / 'shard-000002.tar'}: row {row} key {key} {field}" in str(found.value)
    assert f"expected {expected_checksum(chats, field):016x}" in str(found.value)
    assert ("of image 0" in str(found.value)) == (field == "patches")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_before_the_damaged_one_are_handed_out_and_after_repair_it_goes_on(
    chat: Path, chat_copy: Path, damage: Damage, num_workers: int
) -> None:
    damage("patches", SAMPLE)
    whole = epoch_of(chat)
    at = next(i for i, batch in enumerate(whole) if any(origin.index == SAMPLE for origin in batch.origins))
    found = []
    with stream(chat_copy, num_workers=num_workers) as loader:
        for _ in range(2):  # it stays an error, not an end of the epoch
            with pytest.raises(DatasetFormatError):
                found.extend(loader)  # as far as it comes
        assert len(found) == at
        shutil.copy(chat / "shard-000002.tar", chat_copy)
        found += loader
    assert_same(found, whole)


def test_what_is_not_read_is_not_checked(chat_copy: Path, damage: Damage) -> None:
    damage("patches", SAMPLE)
    assert epoch_of(chat_copy, parts=("tokens", "labels"))


def test_checks_can_be_turned_off(chat: Path, chat_copy: Path, damage: Damage) -> None:
    damage("patches", SAMPLE)
    whole, found = epoch_of(chat), epoch_of(chat_copy, verify=False)
    different = [bool((a.patches != b.patches).any()) for a, b in zip(whole, found, strict=True)]
    assert sum(different) == 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_shard_cut_short_is_named(chat_copy: Path, num_workers: int) -> None:
    path = chat_copy / "shard-000003.tar"
    size = path.stat().st_size
    os.truncate(path, size - 512)
    with pytest.raises(
        DatasetFormatError, match=f"shard-000003.tar: {size - 512} bytes, .* says {size} .*truncated or repl"
    ):
        epoch_of(chat_copy, num_workers=num_workers)


def test_a_shard_cut_short_while_it_is_open_is_an_error_and_no_crash(chat_copy: Path) -> None:
    with stream(chat_copy) as loader:
        list(loader)  # all shards are open
        iterator = iter(loader)
        next(iterator)
        for shard in chat_copy.glob("*.tar"):
            os.truncate(shard, 1024)
        with pytest.raises(
            DatasetFormatError, match=r"row \d+ key \d+ .*: the file ends at byte \d+, [\d,]+ bytes? early"
        ):
            list(iterator)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_missing_shard_is_named(chat_copy: Path, num_workers: int) -> None:
    (chat_copy / "shard-000005.tar").unlink()
    with pytest.raises(DatasetFormatError, match=r"shard-000005.tar: cannot open the shard: No such file"):
        epoch_of(chat_copy, num_workers=num_workers)


def test_a_disk_that_cannot_read_is_named(chat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(ResourceError, match=r"shard-00000\d.tar: row \d+ key \d+ .*Input/output error"):
        epoch_of(chat)


def test_an_error_is_one_of_ours_from_a_worker_as_well(chat_copy: Path) -> None:
    shutil.rmtree(chat_copy, ignore_errors=True)
    with pytest.raises(VlmdataError, match="no such directory"):
        stream(chat_copy, num_workers=1)
