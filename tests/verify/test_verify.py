"""Faults of files: every flipped bit, cut or missing file and edited record is found and placed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from tests.verify.rewriting import edit_manifest_json, rewrite_manifest, rewrite_sample, sha256
from vlmdata.format.index_row import INDEX_SCHEMA
from vlmdata.format.schema import INDEX_NAME, LEDGER_NAME, MANIFEST_NAME, MEMBERS
from vlmdata.storage.open import open_dataset
from vlmdata.verify.dataset import verify_dataset
from vlmdata.verify.fault import Fault

SHARD, ROW, KEY = "shard-000000.tar", 2, "000000002"
MEMBER_KINDS = ["json", *(member.name for member in MEMBERS)]


def found(directory: Path) -> set[tuple[str, str]]:
    return {(fault.file, fault.check) for fault in verify_dataset(directory).faults}


def flip_bit(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0b100
    path.write_bytes(data)


def member_offset(directory: Path, name: str) -> int:
    place = open_dataset(directory).index.row(2).placement
    if name == "json":
        return place.json_offset
    return place.patches_offset if name == "patches" else place.arrays[name].offset


def test_a_dataset_as_it_was_made_is_sound(sound_dataset):
    audit = verify_dataset(sound_dataset)
    assert audit.faults == []
    assert audit.samples == 6
    assert audit.bytes == sum(path.stat().st_size for path in sound_dataset.glob("*.tar"))


def test_a_cord_dataset_is_sound(make_dataset, cord_parquet):
    assert verify_dataset(make_dataset(cord_parquet, rows_per_shard=16)).faults == []


def test_a_dataset_of_rejected_rows_alone_is_sound(make_dataset, tmp_path):
    (tmp_path / "rows.jsonl").write_text("no\nrows\nhere\n")
    assert verify_dataset(make_dataset(tmp_path / "rows.jsonl", recipe="chat", rows_per_shard=2)).faults == []


def test_every_shard_is_reported_as_it_is_done(sound_dataset):
    seen: list[int] = []
    verify_dataset(sound_dataset, on_shard=lambda result: seen.append(result.samples))
    assert seen == [3, 0, 2, 1]


def test_worker_processes_find_the_same(damaged):
    flip_bit(damaged / SHARD, member_offset(damaged, "patches"))
    (damaged / "shard-000003.tar").unlink()
    alone = verify_dataset(damaged, workers=1)
    assert verify_dataset(damaged, workers=2) == alone
    assert len(alone.faults) == 3


def test_a_second_audit_in_one_process_sees_what_changed_since(damaged):
    assert verify_dataset(damaged).faults == []
    rewrite_sample(damaged, KEY, lambda draft: draft.rest.update(note="another text, so other offsets"))
    assert verify_dataset(damaged).faults == []


class TestShards:
    @pytest.mark.parametrize("member", MEMBER_KINDS)
    def test_a_flipped_bit_is_placed_in_its_sample(self, damaged, member):
        flip_bit(damaged / SHARD, member_offset(damaged, member))
        faults = verify_dataset(damaged).faults
        assert {fault.check for fault in faults} == {"sha256", "checksum"}
        assert [(f.file, f.row, f.key) for f in faults if f.check == "checksum"] == [(SHARD, ROW, KEY)]

    @pytest.mark.parametrize("member", MEMBER_KINDS)
    def test_a_flipped_bit_in_a_tar_header_is_placed_in_its_sample(self, damaged, member):
        # The header begins with the member's name; the key in it belongs to this sample.
        data = (damaged / SHARD).read_bytes()
        flip_bit(damaged / SHARD, data.index(f"{KEY}.{member}".encode()))
        faults = verify_dataset(damaged).faults
        assert {fault.check for fault in faults} == {"sha256", "tar", "checksum"}
        assert [(f.file, f.row, f.key) for f in faults if f.check == "checksum"] == [(SHARD, ROW, KEY)]

    def test_a_flipped_bit_after_the_last_sample_is_found_by_the_hash(self, damaged):
        flip_bit(damaged / SHARD, -2000)
        assert found(damaged) == {(SHARD, "sha256")}

    def test_bytes_after_the_end_are_found(self, damaged):
        with open(damaged / SHARD, "ab") as file:
            file.write(b"more")
        assert found(damaged) == {(SHARD, "size"), (SHARD, "sha256"), (SHARD, "tar")}

    def test_a_cut_within_a_sample_names_the_samples_that_are_lost(self, damaged):
        data = (damaged / SHARD).read_bytes()
        (damaged / SHARD).write_bytes(data[: member_offset(damaged, "position_ids")])
        faults = verify_dataset(damaged).faults
        assert {fault.check for fault in faults} == {"size", "sha256", "tar", "cut"}
        assert [(f.row, f.key) for f in faults if f.check == "cut"] == [(ROW, KEY)]

    @pytest.mark.parametrize("kept", [1, 511, 512, 1024])
    def test_a_cut_near_the_start_loses_every_sample(self, damaged, kept):
        (damaged / SHARD).write_bytes((damaged / SHARD).read_bytes()[:kept])
        assert [f.key for f in verify_dataset(damaged).faults if f.check == "cut"] == [f"{n:09d}" for n in range(3)]

    def test_a_cut_within_the_end_mark_is_found(self, damaged):
        place = open_dataset(damaged).index.row(2).placement
        (damaged / SHARD).write_bytes((damaged / SHARD).read_bytes()[: place.offset + place.size])
        assert found(damaged) == {(SHARD, "size"), (SHARD, "sha256"), (SHARD, "tar")}

    def test_an_empty_file_is_found(self, damaged):
        (damaged / SHARD).write_bytes(b"")
        assert found(damaged) == {(SHARD, "unreadable")}

    def test_a_missing_shard_is_found(self, damaged):
        (damaged / "shard-000002.tar").unlink()
        faults = verify_dataset(damaged).faults
        assert [str(fault) for fault in faults] == ["shard-000002.tar: missing: not found; it held 2 samples"]

    def test_a_stray_shard_is_found(self, damaged):
        (damaged / "shard-000004.tar").write_bytes((damaged / SHARD).read_bytes())
        assert found(damaged) == {("shard-000004.tar", "stray")}

    def test_two_exchanged_shards_are_found(self, damaged):
        first, third = damaged / SHARD, damaged / "shard-000002.tar"
        first_data, third_data = first.read_bytes(), third.read_bytes()
        first.write_bytes(third_data)
        third.write_bytes(first_data)
        assert {file for file, _ in found(damaged)} == {first.name, third.name}


class TestManifest:
    @pytest.mark.parametrize(
        ("field", "value", "expected"),
        [
            *((f"totals.{name}", 12345, ("index.parquet", "totals")) for name in ("samples", "tokens", "padding")),
            *((f"totals.{name}", 12345, ("index.parquet", "totals")) for name in ("targets", "items", "patches")),
            ("totals.truncated", 1, (INDEX_NAME, "totals")),
            *((f"totals.{name}", 12345, (MANIFEST_NAME, "shards")) for name in ("rows", "rejected", "bytes")),
            ("shards.0.sha256", "0" * 64, (SHARD, "sha256")),
            ("shards.0.bytes", 7, (SHARD, "size")),
            ("shards.0.name", "shard-000007.tar", ("shard-000007.tar", "missing")),
            ("shards.0.samples", 2, (SHARD, "index")),
            ("shards.1.row_start", 2, (MANIFEST_NAME, "shards")),
            ("shards.1.rejected", 2, (MANIFEST_NAME, "shards")),
            ("rejects", {"no_assistant_turn": 4}, (LEDGER_NAME, "reasons")),
            ("index_sha256", "0" * 64, (INDEX_NAME, "sha256")),
            ("ledger_sha256", "0" * 64, (LEDGER_NAME, "sha256")),
            ("config.options.max_length", 1, (MANIFEST_NAME, "config_hash")),
            ("config.options.pad_multiple", 64, (SHARD, "length")),
            ("config.options", None, (MANIFEST_NAME, "config")),
            ("config_hash", "0" * 64, (MANIFEST_NAME, "config_hash")),
            ("tokenizer.items.image.token", 1, (SHARD, "image_block")),
            ("tokenizer.items.image.after", [1], (SHARD, "image_block")),
            ("tokenizer.turns.end", 1, (SHARD, "end_token")),
            ("tokenizer.pad", 1, (SHARD, "padding")),
            ("tokenizer.vocab_size", 100, (SHARD, "vocabulary")),
            ("tokenizer.turns.assistant", [1], (SHARD, "prompt_target")),
        ],
    )
    def test_an_edited_field_is_found(self, damaged, field, value, expected):
        edit_manifest_json(damaged, field, value)
        assert expected in found(damaged)

    def test_rows_left_out_between_shards_are_found(self, damaged):
        edit_manifest_json(damaged, "shards.1.row_start", 4)
        edit_manifest_json(damaged, "shards.1.row_stop", 7)
        assert (MANIFEST_NAME, "shards") in found(damaged)


def edit_index(directory: Path, edit: Callable[[pa.Table], pa.Table]) -> None:
    """Rewrites the index and its hash in the manifest."""
    pq.write_table(edit(pq.read_table(directory / INDEX_NAME)), directory / INDEX_NAME)
    rewrite_manifest(directory, index_sha256=sha256(directory / INDEX_NAME))


def exchanged(column: pa.ChunkedArray, a: int, b: int) -> pa.Array:
    values = column.to_pylist()
    values[a], values[b] = values[b], values[a]
    return pa.array(values, column.type)


class TestIndex:
    def test_a_changed_byte_is_found_by_the_hash(self, damaged):
        flip_bit(damaged / INDEX_NAME, (damaged / INDEX_NAME).stat().st_size // 2)
        assert (INDEX_NAME, "sha256") in found(damaged)

    def test_a_missing_file_is_found(self, damaged):
        (damaged / INDEX_NAME).unlink()
        assert found(damaged) == {(INDEX_NAME, "missing")}

    def test_an_unreadable_file_is_found(self, damaged):
        (damaged / INDEX_NAME).write_bytes(b"PAR1")
        assert found(damaged) == {(INDEX_NAME, "sha256")}
        rewrite_manifest(damaged, index_sha256=sha256(damaged / INDEX_NAME))
        assert found(damaged) == {(INDEX_NAME, "unreadable")}

    @pytest.mark.parametrize("is_hash_right", [False, True])
    def test_a_flipped_bit_anywhere_is_no_traceback(self, damaged, is_hash_right):
        """With a wrong hash every flip is found. With the right one, those of unused metadata are not."""
        path, draw = damaged / INDEX_NAME, random.Random(36)
        whole = path.read_bytes()
        names = whole.rindex(b"pixel_checksums"), whole.rindex(b"key")  # names of columns in the footer
        for at in [*names, *(draw.randrange(len(whole)) for _ in range(60 if is_hash_right else 10))]:
            content = bytearray(whole)
            content[at] ^= 0x80 if at in names else 1 << draw.randrange(8)
            path.write_bytes(content)
            if is_hash_right:
                rewrite_manifest(damaged, index_sha256=sha256(path))
            faults = verify_dataset(damaged, pixels=False).faults
            assert is_hash_right or [(fault.file, fault.check) for fault in faults] == [(INDEX_NAME, "sha256")]

    def test_samples_are_not_accused_by_an_index_that_changed(self, damaged):
        table = pq.read_table(damaged / INDEX_NAME)
        lengths = pc.add(table["length"], 1).cast(pa.int32())
        place = table.column_names.index("length")
        pq.write_table(table.set_column(place, table.schema.field("length"), lengths), damaged / INDEX_NAME)
        (fault,) = verify_dataset(damaged).faults
        assert (fault.file, fault.check) == (INDEX_NAME, "sha256")
        assert fault.message.endswith("; the samples were not checked against it")

    @pytest.mark.parametrize("column", INDEX_SCHEMA.names)
    def test_facts_of_two_samples_exchanged_are_found_though_hash_and_sums_agree(self, damaged, column):
        def exchange(table: pa.Table) -> pa.Table:
            # Of the samples pick two that differ in this fact; a sum over the column stays what it was.
            values = table.column(column).to_pylist()
            a, b = next(((a, b) for a in range(6) for b in range(a) if values[a] != values[b]), (0, 0))
            if a == b:  # all alike: change one
                only = pc.invert(table.column(column)) if column == "truncated" else None
                return table.set_column(table.column_names.index(column), INDEX_SCHEMA.field(column), only)
            field = INDEX_SCHEMA.field(column)
            return table.set_column(table.column_names.index(column), field, exchanged(table.column(column), a, b))

        edit_index(damaged, exchange)
        assert found(damaged)

    def test_a_lost_sample_is_found(self, damaged):
        edit_index(damaged, lambda table: table.slice(1))
        assert {(SHARD, "index"), (INDEX_NAME, "totals"), (LEDGER_NAME, "coverage")} <= found(damaged)

    def test_a_repeated_sample_is_found(self, damaged):
        edit_index(damaged, lambda table: pa.concat_tables([table.slice(0, 1), table]))
        assert {(INDEX_NAME, "keys"), (INDEX_NAME, "order"), (LEDGER_NAME, "coverage")} <= found(damaged)

    def test_samples_out_of_order_are_found(self, damaged):
        edit_index(damaged, lambda table: table.take([1, 0, 2, 3, 4, 5]))
        assert found(damaged) == {(INDEX_NAME, "order")}

    def test_shards_out_of_order_are_found(self, damaged):
        edit_index(damaged, lambda table: table.take([3, 4, 5, 0, 1, 2]))
        assert (INDEX_NAME, "order") in found(damaged)


class TestLedger:
    @staticmethod
    def edit(directory: Path, edit: Callable[[list[dict[str, Any]]], Any]) -> None:
        path = directory / LEDGER_NAME
        entries = [json.loads(line) for line in path.read_text().splitlines()]
        edit(entries)
        path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        rewrite_manifest(directory, ledger_sha256=sha256(path))

    def test_a_changed_message_is_found_by_the_hash(self, damaged):
        path = damaged / LEDGER_NAME
        path.write_text(path.read_text().replace("missing.png", "present.png"))
        assert found(damaged) == {(LEDGER_NAME, "sha256")}

    def test_a_missing_file_is_found(self, damaged):
        (damaged / LEDGER_NAME).unlink()
        assert found(damaged) == {(LEDGER_NAME, "missing")}

    def test_a_lost_rejection_is_found_though_the_hash_agrees(self, damaged):
        self.edit(damaged, lambda entries: entries.pop())
        assert found(damaged) == {(LEDGER_NAME, "reasons"), (LEDGER_NAME, "coverage")}

    def test_another_reason_is_found_though_the_hash_agrees(self, damaged):
        self.edit(damaged, lambda entries: entries[0].update(reason="overlong"))
        assert found(damaged) == {(LEDGER_NAME, "reasons")}

    @pytest.mark.parametrize("row", [0, 10, 9])
    def test_another_row_is_found_though_the_hash_agrees(self, damaged, row):
        self.edit(damaged, lambda entries: entries[0].update(row=row))
        assert found(damaged) == {(LEDGER_NAME, "coverage")}

    @pytest.mark.parametrize("garbage", [b"nonsense\n", b"\xff\xfe\n", b'{"row": 1e999}\n'])
    def test_a_line_that_is_no_rejection_is_found(self, damaged, garbage):
        with open(damaged / LEDGER_NAME, "ab") as file:
            file.write(garbage)
        assert found(damaged) == {(LEDGER_NAME, "sha256"), (LEDGER_NAME, "unreadable")}


def test_a_fault_is_one_line_that_begins_with_its_place():
    assert str(Fault("shard-000000.tar", "size", "too short")) == "shard-000000.tar: size: too short"
    assert str(Fault("shard-000000.tar", "mask", "m", 7, "k")) == "shard-000000.tar row 7 key k: mask: m"
