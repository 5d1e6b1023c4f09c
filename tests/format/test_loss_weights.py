"""The member ``loss_weights``: written where a target weighs other than 1, and nowhere else does anything change."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset as wds

import vlmdata
from tests.chat_rows import mixed_rows
from tests.conftest import build_dataset, tree_bytes
from tests.verify.rewriting import edit_manifest_json, rewrite_manifest, rewrite_sample, sha256
from tests.weighted import build_weighted
from vlmdata.errors import DatasetFormatError
from vlmdata.format.index import DatasetIndex
from vlmdata.format.index_row import INDEX_SCHEMA, index_schema
from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import INDEX_NAME, LOSS_WEIGHTS, MANIFEST_NAME
from vlmdata.preprocess.config import TrainTurns
from vlmdata.verify.dataset import verify_dataset

#: By source row: weight of the sample, weights of its assistant turns.
WEIGHTS: dict[int, tuple[float, list[float | None]]] = {2: (0.5, [3.0, 0.1]), 6: (2.0, [None]), 8: (1.0, [0, None])}
WEIGHTED = ["000000002", "000000006"]


def rows(weights: dict[int, tuple[float, list[float | None]]]) -> list[dict[str, Any]]:
    extra = {n: {"of_sample": sample, "of_turns": turns} for n, (sample, turns) in weights.items()}
    return [{**row, **extra.get(number, {})} for number, row in enumerate(mixed_rows())]


@pytest.fixture(scope="module")
def weighted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The mixed rows in four shards (one is empty, one without a weight); two samples weigh other than 1."""
    return build_weighted(tmp_path_factory.mktemp("weighted"), rows(WEIGHTS), rows_per_shard=3)


@pytest.fixture
def copy(weighted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(weighted, tmp_path / "copy"))


def faults(directory: Path) -> set[str]:
    return {fault.check for fault in verify_dataset(directory).faults}


def test_only_samples_with_another_weight_than_1_have_it(weighted: Path) -> None:
    dataset = vlmdata.open_dataset(weighted)
    assert dataset.manifest.features == ("images", "loss-weights", "patches-raw")
    assert [sample.key for sample in dataset if sample.loss_weights is not None] == WEIGHTED
    for sample in dataset:
        if sample.loss_weights is None:
            continue
        assert (sample.loss_weights.dtype, sample.loss_weights.shape) == (np.float32, sample.input_ids.shape)
        assert not sample.loss_weights.flags.writeable
        assert np.array_equal(sample.loss_weights > 0, sample.loss_mask == 1)
        wanted = {"000000002": {np.float32(1.5), np.float32(0.05)}, "000000006": {np.float32(2)}}[sample.key]
        assert set(sample.loss_weights[sample.loss_mask == 1]) == wanted
    told = {dataset.index.key(i): dataset.metadata(i).get("turn_weights") for i in range(len(dataset))}
    assert {key: value for key, value in told.items() if value} == {
        "000000002": [1.5, float(np.float32(0.05))],
        "000000006": [2.0],
        "000000008": [0.0, 1.0],
    }


def test_it_is_sound_and_plain_webdataset_reads_it(weighted: Path) -> None:
    assert verify_dataset(weighted).faults == []
    dataset = vlmdata.open_dataset(weighted)
    plain = wds.WebDataset(sorted(map(str, weighted.glob("*.tar"))), shardshuffle=False).decode()
    for found, sample in zip(plain, dataset, strict=True):
        assert found["__key__"] == sample.key
        names = {name for name in found if not name.startswith("__") and name != "json"}
        assert names == {f"{name}.npy" for name in sample.arrays()}
        for name, array in sample.arrays().items():
            np.testing.assert_array_equal(found[f"{name}.npy"], array)


def test_what_uses_no_weights_is_as_it_was_before_there_were_any(weighted: Path, tmp_path: Path) -> None:
    """Shards and index of a dataset without weights equal those of the chat recipe, whose rows say nothing of them."""
    ones = build_weighted(tmp_path / "ones", rows({2: (1.0, [1.0, 1]), 6: (1, [None])}), rows_per_shard=3)
    never = build_dataset(tmp_path / "ones" / "rows.jsonl", tmp_path / "never", recipe="chat", rows_per_shard=3)
    other = (MANIFEST_NAME, "rows.parquet")  # counts of keys
    same = {name: data for name, data in tree_bytes(never).items() if name not in other}
    assert same == {name: data for name, data in tree_bytes(ones).items() if name not in other}
    assert pq.read_schema(ones / INDEX_NAME).names == INDEX_SCHEMA.names
    assert Manifest.read(ones).features == ("images", "patches-raw")
    # Shards without a weighted sample are untouched by those that have one.
    for shard in ("shard-000001.tar", "shard-000003.tar"):
        assert (weighted / shard).read_bytes() == (ones / shard).read_bytes()
    assert pq.read_schema(weighted / INDEX_NAME).names == index_schema([LOSS_WEIGHTS]).names


def test_text_alone_uses_no_feature_and_turns_of_weight_0_none_either(tmp_path: Path) -> None:
    text = [row for row in rows({}) if "image" not in json.dumps(row)]
    for name, chats, features in [("text", text, ()), ("0", rows({8: (1, [0, None])}), ("images", "patches-raw"))]:
        made = build_weighted(tmp_path / name, chats)
        assert Manifest.read(made).features == features
        assert faults(made) == set()


def test_an_old_reader_refuses_weights_by_the_feature(weighted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmdata.format.manifest.supported_features", lambda: {"images", "patches-raw"})
    with pytest.raises(DatasetFormatError, match=r"lacks: loss-weights\. Read it with .* vlmdata 0"):
        vlmdata.open_dataset(weighted)


def test_the_last_turn_alone_with_weights_is_sound(tmp_path: Path) -> None:
    made = build_weighted(tmp_path, rows(WEIGHTS), train_turns=TrainTurns.LAST)
    assert faults(made) == set()
    dataset = vlmdata.open_dataset(made)
    assert dataset.metadata(dataset.index.position_of("000000002"))["turn_weights"][0] == 0
    assert "turn_weights" not in dataset.metadata(dataset.index.position_of("000000008"))


class TestFaults:
    @pytest.mark.parametrize(
        ("change", "checks"),
        [
            (lambda w, mask: w.__setitem__(np.argmax(mask), np.nan), {"weights", "turn_weights"}),
            (lambda w, mask: w.__setitem__(np.argmax(mask), np.inf), {"weights", "turn_weights"}),
            (lambda w, mask: w.__setitem__(np.argmax(mask), -1), {"weights", "turn_weights"}),
            (lambda w, mask: w.__setitem__(np.argmax(mask), 0), {"weights", "turn_weights"}),
            (lambda w, mask: w.__setitem__(0, 1), {"weights"}),
            (lambda w, mask: w.__setitem__(-1, 1e-30), {"weights"}),
            (lambda w, mask: w.__setitem__(np.argmax(mask), 0.7), {"turn_weights"}),
        ],
        ids=["nan", "inf", "negative", "zero on target", "off target", "padding", "not the turn's"],
    )
    def test_wrong_weights(self, copy: Path, change: Any, checks: set[str]) -> None:
        rewrite_sample(copy, "000000002", lambda draft: change(draft.loss_weights, draft.loss_mask))
        assert faults(copy) == checks

    @pytest.mark.parametrize(
        "weights", [np.ones(7, np.float32), np.ones((1, 80), np.float32)], ids=["shorter", "another shape"]
    )
    def test_wrong_shape(self, copy: Path, weights: np.ndarray) -> None:
        rewrite_sample(copy, "000000002", lambda draft: setattr(draft, "loss_weights", weights))
        assert faults(copy) == {"shape"}

    def test_weights_that_were_dropped(self, copy: Path) -> None:
        rewrite_sample(copy, "000000002", lambda draft: setattr(draft, "loss_weights", None))
        assert faults(copy) == {"turn_weights"}

    @pytest.mark.parametrize(
        ("told", "check"),
        [
            ([1.5], "turn_weights"),
            ([1.5, 0.0], "prompt_target"),
            ([-1, 1], "metadata"),
            ("x", "metadata"),
            (None, "metadata"),
        ],
    )
    def test_metadata_that_tells_something_else(self, copy: Path, told: Any, check: str) -> None:
        rewrite_sample(copy, "000000002", lambda draft: draft.rest.__setitem__("turn_weights", told))
        assert check in faults(copy)

    def test_a_turn_of_weight_0_needs_the_metadata_to_say_so(self, copy: Path) -> None:
        rewrite_sample(copy, "000000008", lambda draft: draft.rest.pop("turn_weights"))
        assert faults(copy) == {"untaught_turn"}

    @pytest.mark.parametrize("features", [["images", "patches-raw"], ["loss-weights"]])
    def test_a_feature_that_the_manifest_leaves_out(self, copy: Path, features: list[str]) -> None:
        edit_manifest_json(copy, "features", features)
        assert faults(copy) == {"features"}

    def test_a_feature_that_no_sample_uses(self, copy: Path) -> None:
        for key in WEIGHTED:
            rewrite_sample(copy, key, lambda draft: setattr(draft, "loss_weights", None))
        assert "features" in faults(copy)
        with pytest.raises(DatasetFormatError, match="feature loss-weights, but the index lacks loss_weights_offset"):
            vlmdata.open_dataset(copy)

    @pytest.mark.parametrize(
        ("column", "value"),
        [("loss_weights_offset", -1), ("loss_weights_offset", 64), ("loss_weights_checksum", 7)],
    )
    def test_another_place_or_checksum_in_the_index(self, copy: Path, column: str, value: int) -> None:
        table = pq.read_table(copy / INDEX_NAME)
        values = table.column(column).to_pylist()
        values[2] = value
        field = table.schema.field(column)
        changed = table.set_column(table.column_names.index(column), field, pa.array(values, field.type))
        pq.write_table(changed, copy / INDEX_NAME)
        rewrite_manifest(copy, index_sha256=sha256(copy / INDEX_NAME))
        assert faults(copy) & {"member", "tar", "index"}

    def test_half_of_the_columns(self, copy: Path) -> None:
        table = pq.read_table(copy / INDEX_NAME).drop_columns(["loss_weights_checksum"])
        pq.write_table(table, copy / INDEX_NAME)
        with pytest.raises(DatasetFormatError, match=r"lacks the columns loss_weights_checksum$"):
            DatasetIndex.read(copy / INDEX_NAME)
