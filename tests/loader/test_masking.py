"""``on_damage="mask"``: damaged samples keep their place without targets, alike on all ranks, named and counted."""

from __future__ import annotations

import copy
import json
import logging
import shutil
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.loader import helpers
from tests.loader.helpers import assert_same, differences
from tests.loader.synthetic import IMAGE_TOKEN, PAD, write_dataset
from vlmdata.batch import IGNORE_INDEX, PackedBatch
from vlmdata.errors import DatasetFormatError, UsageError
from vlmdata.format.dataset import VlmDataset
from vlmdata.loader.loader import StreamingLoader
from vlmdata.storage.shards import ShardStore

SAMPLES = 24
#: A sample with two images.
SAMPLE = 6
MEMBERS = ("input_ids", "loss_mask", "loss_weights", "position_ids", "patches")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples with none to three images, with loss weights."""
    return write_dataset(
        tmp_path_factory.mktemp("masking") / "data", shards=3, samples_per_shard=SAMPLES // 3, weighted=True
    )


def stream(folder: Path, **options: Any) -> StreamingLoader:
    return helpers.stream(folder, max_patches=400, **options)


def epoch_of(folder: Path, **options: Any) -> list[PackedBatch]:
    with stream(folder, **options) as loader:
        return list(loader)


def damage(folder: Path, *places: tuple[int, str]) -> None:
    """Changes a byte in a member of samples; of patches, in the last image."""
    dataset = VlmDataset(folder)
    index = dataset.index
    for sample, member in places:
        if member == "patches":
            if not index.item_counts[sample]:
                continue
            offset = int(index.item_offsets[index.grid_offsets[sample + 1] - 1])
        else:
            offset = int(index.data_offsets[member][sample])
        with open(dataset.shard_path(int(index.shard[sample])), "r+b") as file:
            file.seek(offset + 5)
            value = file.read(1)[0]
            file.seek(offset + 5)
            file.write(bytes([value ^ 1]))


@pytest.fixture
def damaged(data: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the samples with damaged members."""

    def make(*places: tuple[int, str]) -> Path:
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        shutil.copytree(data, folder)
        damage(folder, *places)
        return folder

    return make


def expected(batch: PackedBatch, samples: Sequence[int]) -> PackedBatch:
    """A whole batch with some samples masked, after the definition."""
    batch = batch.clone()
    masked = []
    family = batch.family
    patches = np.cumsum([0, *batch.host.image_grid_thw.prod(axis=1)])
    for number, origin in enumerate(batch.origins):
        if origin.index not in samples:
            continue
        masked.append(number)
        begin = int(batch.cu_seqlens_padded[number])
        stop = begin + int(batch.cu_seqlens[number + 1] - batch.cu_seqlens[number])
        batch.input_ids[0, begin:stop] = PAD
        batch.labels[0, begin:stop] = IGNORE_INDEX
        batch.loss_mask[0, begin:stop] = 0
        batch.loss_weights[0, begin:stop] = 0
        for image, start in enumerate(batch.host.image_starts.tolist()):
            if begin <= start < stop:
                count = int(family.token_counts(batch.host.image_grid_thw[image])[0])
                batch.input_ids[0, start : start + count] = IMAGE_TOKEN
                batch.patches[patches[image] : patches[image + 1]] = 0
    object.__setattr__(batch, "masked", tuple(masked))
    return batch


def masking(folder: Path, **options: Any) -> list[PackedBatch]:
    return epoch_of(folder, on_damage="mask", **options)


@pytest.fixture(scope="module")
def sound(data: Path) -> list[PackedBatch]:
    return epoch_of(data, context_parallel=2)


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    places=st.lists(
        st.tuples(st.integers(0, SAMPLES - 1), st.sampled_from(MEMBERS)), min_size=1, max_size=5, unique=True
    ),
    parts=st.sets(st.sampled_from(["tokens", "labels", "pixels"])),
    rank=st.sampled_from([None, 0, 1]),
)
def test_every_rank_masks_the_same_samples_and_changes_nothing_else(
    data: Path,
    sound: list[PackedBatch],
    damaged: Callable[..., Path],
    places: list[tuple[int, str]],
    parts: set[str],
    rank: int | None,
) -> None:
    index = VlmDataset(data).index
    samples = [sample for sample, member in places if member != "patches" or index.item_counts[sample]]
    folder = damaged(*places)
    found = masking(folder, context_parallel=2, context_parallel_rank=rank, parts=tuple(parts))
    absent = {name for name, part in PART_OF.items() if part not in parts}
    for batch, of in zip(found, sound, strict=True):
        wanted = expected(of, samples)
        if rank is not None:
            wanted = wanted.context_parallel_shard(rank, 2)
        assert set(differences(batch, wanted)) <= absent


PART_OF = {
    "input_ids": "tokens",
    "labels": "labels",
    "loss_mask": "labels",
    "loss_weights": "labels",
    "patches": "pixels",
}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_damage_is_named_once_and_counted(
    data: Path, damaged: Callable[..., Path], caplog: pytest.LogCaptureFixture, num_workers: int
) -> None:
    folder = damaged((SAMPLE, "patches"), (SAMPLE, "input_ids"), (17, "loss_mask"))
    index = VlmDataset(folder).index
    names = [
        f"{folder}/shard-{index.shard[sample]:06d}.tar: row {index.source_row[sample]} key {index.key(sample)}"
        for sample in (SAMPLE, 17)
    ]
    with caplog.at_level(logging.WARNING), stream(folder, on_damage="mask", num_workers=num_workers) as loader:
        for _ in range(2):
            list(loader)
        assert [str(each) for each in loader.stats.damaged] == names
        state = json.loads(json.dumps(loader.state_dict()))
        twin = copy.deepcopy(loader)
    said = [record.getMessage() for record in caplog.records if record.name == "vlmdata.loader.damage"]
    assert sorted(text.split(" input_ids")[0].split(" loss_mask")[0] for text in said) == sorted(names)
    assert twin.stats.damaged == loader.stats.damaged
    twin.close()
    with stream(folder, on_damage="mask") as resumed:
        resumed.load_state_dict(state)
        assert [str(each) for each in resumed.stats.damaged] == names
        assert resumed.state_dict() == state


@pytest.mark.parametrize("num_workers", [0, 2])
def test_beyond_the_limit_all_are_named(damaged: Callable[..., Path], num_workers: int) -> None:
    folder = damaged((1, "input_ids"), (9, "loss_mask"), (20, "position_ids"))
    keys = [VlmDataset(folder).index.key(sample) for sample in (1, 9, 20)]
    with stream(folder, on_damage="mask", max_damaged=2, num_workers=num_workers) as loader:
        for _ in range(2):  # it stays an error
            with pytest.raises(
                DatasetFormatError, match="3 samples of this run are damaged, more than max_damaged 2"
            ) as e:
                list(loader)
            assert all(f"key {key}" in str(e.value) for key in keys)
        assert len(loader.stats.damaged) <= 2


def test_the_limit_holds_over_a_resume_and_over_ranks(damaged: Callable[..., Path]) -> None:
    folder = damaged((1, "input_ids"))
    with stream(folder, on_damage="mask", max_damaged=2) as loader:
        state = loader.state_dict() | {"damaged": [[0, 5]]}
        loader.add_damaged([(0, 9), (0, 20)])
        loader.add_damaged([(0, 20)])
        with pytest.raises(DatasetFormatError, match="3 samples"):
            loader.add_damaged([(0, 5)])
        assert [each.index for each in loader.stats.damaged] == [9, 20]
    with stream(folder, on_damage="mask", max_damaged=1) as resumed:
        resumed.load_state_dict(state)
        with pytest.raises(DatasetFormatError, match="max_damaged 1") as refused:
            list(resumed)
        assert "key 000000005" in str(refused.value)
        assert "key 000000001" in str(refused.value)


def test_other_faults_stay_errors(damaged: Callable[..., Path]) -> None:
    folder = damaged()
    shard = folder / "shard-000001.tar"
    content = shard.read_bytes()
    shard.write_bytes(content[:-512])
    with pytest.raises(DatasetFormatError, match="but the manifest says"):
        masking(folder)
    shard.unlink()
    with pytest.raises(DatasetFormatError, match="cannot open the shard"):
        masking(folder)
    with pytest.raises(UsageError, match="on_damage is 'mask', but verify is 'off'"):
        stream(folder, on_damage="mask", verify="off")


def test_undamaged_data_costs_a_whole_rank_no_second_read(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = ShardStore.read
    monkeypatch.setattr(ShardStore, "read", lambda self, *a: (read.append(a[3].nbytes), original(self, *a))[1])
    assert_same(masking(data), epoch_of(data))
    half = len(read) // 2
    assert read[:half] == read[half:]


def test_a_resume_within_a_masked_epoch_is_exact(damaged: Callable[..., Path]) -> None:
    folder = damaged((SAMPLE, "patches"), (17, "loss_mask"))
    whole = masking(folder)
    with stream(folder, on_damage="mask") as loader:
        found = list(islice(loader, 3))
        state = loader.state_dict()
    with stream(folder, on_damage="mask", num_workers=1) as loader:
        loader.load_state_dict(state)
        found += loader
    assert_same(found, whole)
