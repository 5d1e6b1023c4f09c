"""Faults in datasets whose rows gave lists: the audit knows each element of each list."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.list_recipe import build_lists
from tests.verify.rewriting import edit_manifest_json, rewrite_manifest, rewrite_sample, sha256
from vlmdata.format.index_row import INDEX_SCHEMA
from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import INDEX_NAME, LEDGER_NAME, MANIFEST_NAME
from vlmdata.verify.dataset import verify_dataset


@pytest.fixture(scope="module")
def lists(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_lists(tmp_path_factory.mktemp("lists"))


@pytest.fixture
def damaged(lists: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(lists, tmp_path / "damaged"))


def found(directory: Path) -> set[tuple[str, str]]:
    return {(fault.file, fault.check) for fault in verify_dataset(directory).faults}


def edit_ledger(directory: Path, number: int, **fields: Any) -> None:
    path = directory / LEDGER_NAME
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    entries[number] = {name: value for name, value in {**entries[number], **fields}.items() if value is not None}
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    rewrite_manifest(directory, ledger_sha256=sha256(path))


def edit_keys(directory: Path, old: str, new: str) -> None:
    table = pq.read_table(directory / INDEX_NAME, schema=INDEX_SCHEMA)
    keys = [new if key == old else key for key in table.column("key").to_pylist()]
    column = pa.array(keys, INDEX_SCHEMA.field("key").type)
    pq.write_table(table.set_column(0, INDEX_SCHEMA.field("key"), column), directory / INDEX_NAME)
    rewrite_manifest(directory, index_sha256=sha256(directory / INDEX_NAME))


# Of row 1, samples 0 and 2 were accepted (1 and 3 rejected); row 2 gave an empty list, row 4 none at all.
@pytest.mark.parametrize(
    ("entry", "fields"),
    [
        (0, {"sample": None}),  # the whole row rejected, though it has samples
        (0, {"sample": 2}),  # rejected and accepted
        (1, {"sample": 4}),  # a gap
        (0, {"row": 5}),
        (2, {"sample": 1}),
        (2, {"row": 3}),
    ],
)
def test_a_rejection_that_names_another_sample_is_found(damaged: Path, entry: int, fields: dict[str, Any]) -> None:
    edit_ledger(damaged, entry, **fields)
    assert found(damaged) == {(LEDGER_NAME, "coverage")}


def test_a_row_that_is_both_rejected_and_a_list_of_samples_is_found_though_all_counts_agree(damaged: Path) -> None:
    path = damaged / LEDGER_NAME
    line = {"row": 5, "reason": "no_samples", "message": "beside two samples"}
    path.write_text(path.read_text() + json.dumps(line) + "\n")
    manifest = Manifest.read(damaged)
    counts = {"rejected": manifest.totals.rejected + 1, "extra_candidates": manifest.totals.extra_candidates + 1}
    rewrite_manifest(
        damaged,
        ledger_sha256=sha256(path),
        rejects={**manifest.rejects, "no_samples": 2},
        totals=dataclasses.replace(manifest.totals, **counts),
        shards=(dataclasses.replace(manifest.shards[0], **counts),),
    )
    assert found(damaged) == {(LEDGER_NAME, "coverage")}


def test_a_list_cut_at_its_end_is_found_by_the_number_of_candidates(damaged: Path) -> None:
    path = damaged / LEDGER_NAME
    lines = path.read_text().splitlines(keepends=True)
    del lines[1]  # the last of row 1, so what is left has no gap
    path.write_text("".join(lines))
    rewrite_manifest(damaged, ledger_sha256=sha256(path))
    assert (LEDGER_NAME, "coverage") in found(damaged)
    assert "13 candidates, but there are 12" in " ".join(str(fault) for fault in verify_dataset(damaged).faults)


@pytest.mark.parametrize("sample", ["0", -1, 1.5, True, 2**63])
def test_a_number_that_is_none_is_found(damaged: Path, sample: Any) -> None:
    edit_ledger(damaged, 0, sample=sample)
    assert found(damaged) == {(LEDGER_NAME, "unreadable")}


@pytest.mark.parametrize(
    ("place", "value", "faults"),
    [
        ("totals.extra_candidates", 4, {(MANIFEST_NAME, "shards"), (LEDGER_NAME, "coverage")}),
        ("shards.0.extra_candidates", 6, {(MANIFEST_NAME, "shards")}),
    ],
)
def test_counts_that_do_not_add_up_are_found(
    damaged: Path, place: str, value: int, faults: set[tuple[str, str]]
) -> None:
    edit_manifest_json(damaged, place, value)
    assert found(damaged) == faults


@pytest.mark.parametrize(
    ("new", "fault"),
    [
        ("000000001-003", (LEDGER_NAME, "coverage")),
        ("000000001", (LEDGER_NAME, "coverage")),
        ("000000002-000", (INDEX_NAME, "keys")),
        ("000000001.000", (INDEX_NAME, "keys")),
        ("a sample", (INDEX_NAME, "keys")),
    ],
)
def test_a_key_that_names_another_place_is_found(damaged: Path, new: str, fault: tuple[str, str]) -> None:
    edit_keys(damaged, "000000001-002", new)
    assert fault in found(damaged)


def test_metadata_that_names_another_place_is_found(damaged: Path) -> None:
    rewrite_sample(damaged, "000000001-002", lambda draft: draft.rest.update(sample=1))
    assert found(damaged) == {("shard-000000.tar", "metadata")}
