"""Documents and lists of samples through the loader: as stored, each once, every target a label."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.documents import build_documents
from tests.list_recipe import LIST_KEYS, build_lists
from tests.loader.helpers import epoch_of
from tests.loader.test_content import assert_holds_its_samples
from vlmdata.batch import IGNORE_INDEX
from vlmdata.storage.open import open_dataset


@pytest.mark.parametrize("build", [build_documents, build_lists])
def test_all_samples_of_all_rows_come_as_they_are_stored(build: Callable[[Path], Path], tmp_path: Path) -> None:
    directory = build(tmp_path)
    dataset = open_dataset(directory)
    batches = epoch_of(directory, capacity=256, global_batch=1)
    for batch in batches:
        assert_holds_its_samples(batch, dataset)
    assert Counter(key for batch in batches for key in batch.sample_keys) == Counter(dataset.index.keys.to_pylist())
    labels = sum(int((batch.labels != IGNORE_INDEX).sum()) for batch in batches if batch.labels is not None)
    assert labels == int(dataset.index.num_targets.sum())


def test_origins_name_the_row_and_keys_the_sample_in_it(tmp_path: Path) -> None:
    named = {
        (origin.row, key)
        for batch in epoch_of(build_lists(tmp_path), capacity=256, global_batch=1)
        for origin, key in zip(batch.origins, batch.sample_keys, strict=True)
    }
    assert named == {(int(key[:9]), key) for key in LIST_KEYS}
