"""Any samples of any kind of dataset can be selected: the audit is clean, and each sample is the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chat_rows import image_item, mixed_rows, turn, write_jsonl
from tests.conftest import build_dataset
from tests.documents import build_documents
from tests.list_recipe import build_lists
from tests.weighted import build_weighted, with_weights
from vlmdata.format.dataset import VlmDataset
from vlmdata.preprocess.config import TrainTurns
from vlmdata.select.choice import Choice, Keys, choose
from vlmdata.select.compare import compare
from vlmdata.select.dataset import select_dataset
from vlmdata.storage import open_store
from vlmdata.storage.join import join_datasets
from vlmdata.verify.dataset import verify_dataset


def talks() -> list[dict[str, Any]]:
    """Conversations of several turns about pictures, two of them the same; reasoning is dropped from one."""
    rows = []
    for seed in (0, 1, 0):
        ask, answer = turn("user", image_item(seed=seed), "What?"), turn("assistant", "A.")
        again = turn("user", image_item(seed=seed + 1), "And?")
        rows.append({"messages": [ask, answer | {"reasoning_content": "Hm."}, again, turn("assistant", "B.")]})
    return rows


def chats(folder: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    source = write_jsonl(folder / "rows.jsonl", rows)
    return build_dataset(source, folder / "dataset", recipe="chat", rows_per_shard=2, **options)


KINDS: dict[str, Callable[[Path], Path]] = {
    "turns, zstd": lambda folder: chats(folder, talks(), train_turns=TrainTurns.EACH, pixels="zstd"),
    "reasoning": lambda folder: chats(folder, talks()),
    "files": lambda folder: chats(folder, talks(), pixels="source"),
    "lists": lambda folder: build_lists(folder, rows_per_shard=3),
    "documents": lambda folder: build_documents(folder, rows_per_shard=2),
    "weights": lambda folder: build_weighted(folder, with_weights(mixed_rows())),
}


@pytest.fixture(scope="module", params=list(KINDS))
def dataset(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VlmDataset:
    place = KINDS[request.param](tmp_path_factory.mktemp("kind"))
    assert verify_dataset(place).faults == []
    return VlmDataset(place)


@settings(max_examples=3)
@given(st.data())
def test_any_subset(dataset: VlmDataset, data: st.DataObject) -> None:
    names = [str(key) for key in dataset.index.keys.to_pylist()]
    wanted = data.draw(st.sets(st.sampled_from(names), min_size=1))
    left = set(names) - wanted
    with TemporaryDirectory() as folder:
        places = {name: Path(folder) / name for name in ("chosen", "others", "both")}
        for place, keys in (("chosen", wanted), ("others", left)):
            if not keys:
                continue
            choice = Choice(keys=Keys("keys.txt", tuple(keys)))
            chosen = choose(dataset, choice)
            store = open_store(dataset.directory)
            select_dataset(dataset, store, open_store(places[place]), choice, chosen)
            assert verify_dataset(places[place]).faults == []
            selected = VlmDataset(places[place])
            found = compare(dataset, selected)
            assert (found.changed, found.only_second, set(found.only_first)) == ((), (), set(names) - keys)
            for i in range(len(selected)):
                whole = dataset.sample(selected.index.key(i))
                for name, array in selected[i].arrays().items():
                    assert array.tobytes() == getattr(whole, name).tobytes()
        if left:
            join_datasets([open_store(places["chosen"]), open_store(places["others"])], open_store(places["both"]))
            assert verify_dataset(places["both"]).faults == []
